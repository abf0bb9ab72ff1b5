"""Log-probability and entropy over a vocabulary that is sharded over tensor-parallel ranks.

With ``z`` the logits over the temperature, ``m`` their largest and ``s = sum exp(z - m)``, all reduced over the ranks,
``log p(v) = z_v - m - log s`` and the entropy is ``log s - sum (z - m) exp(z - m) / s``. Padding rows of the vocabulary
are left out.
"""

from dataclasses import dataclass

import torch
import torch.distributed
from torch import Tensor

from mca_config.errors import McaError
from mca_models.megatron.distributed import parallel
from mca_models.megatron.types import Upstream


@dataclass(frozen=True, kw_only=True)
class TokenValues:
    """Log-probability, and optionally entropy, of each token.

    Args:
        temperature: Divisor of the logits.
        entropy: Also the entropy of the distribution that the token was drawn from.
    """

    temperature: float = 1.0
    entropy: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.temperature < float("inf"):
            raise McaError(f"temperature is {self.temperature}; expected a positive number")

    def __call__(self, logits: Tensor, tokens: Tensor, vocab_size: int) -> Tensor:
        """Return fp32 log-probabilities ``[...]``, with the entropy ``[2, ...]``, on every tensor-parallel rank.

        Args:
            logits: ``[..., padded_vocab / tp]`` of this tensor-parallel rank.
            tokens: ``[...]``, the tokens.
            vocab_size: Size of the full vocabulary, without padding.
        """
        values: Tensor = _Values.apply(logits, tokens, vocab_size, self.temperature, self.entropy)
        return values if self.entropy else values[0]

    def peak_bytes(self, tokens: int, columns: int, itemsize: int) -> int:
        """Return the peak memory without gradients: the logits, one fp32 copy, and another one for the entropy.

        Args:
            tokens: Tokens of a chunk.
            columns: Vocabulary columns on a rank.
            itemsize: Bytes of one logit.
        """
        return tokens * columns * (itemsize + 4 * (1 + self.entropy))


class _Values(torch.autograd.Function):
    """Autograd function that saves one fp32 copy of the logits; its backward pass does not communicate."""

    @staticmethod
    def forward(
        ctx: Upstream, logits: Tensor, tokens: Tensor, vocab_size: int, temperature: float, entropy: bool
    ) -> Tensor:
        group = parallel.tensor_group()
        first = group.rank() * logits.shape[-1]
        true = min(max(vocab_size - first, 0), logits.shape[-1])
        z = _divided(logits[..., :true], temperature)
        largest = z.amax(-1) if true else z.new_full(z.shape[:-1], -torch.inf)
        if group.size() > 1:
            torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX, group=group)
        z.sub_(largest.unsqueeze(-1))
        here = (tokens >= first) & (tokens < first + true)
        index = ((tokens - first) * here).unsqueeze(-1)
        sums = z.new_zeros(2 + entropy, *z.shape[:-1])
        if true:
            sums[0] = z.gather(-1, index).squeeze(-1) * here
        keep = ctx.needs_input_grad[0]
        powers = z.exp() if keep or entropy else z.exp_()
        sums[1] = powers.sum(-1)
        if entropy:
            sums[2] = (powers.mul_(z) if keep else z.mul_(powers)).sum(-1)
        del powers
        if group.size() > 1:
            torch.distributed.all_reduce(sums, group=group)
        log_sum = sums[1].log()
        values = [sums[0] - log_sum]
        if entropy:
            values.append(log_sum - sums[2] / sums[1])
        if keep:
            ctx.save_for_backward(z, log_sum, index, here, *values[1:])
        ctx.shape, ctx.dtype, ctx.true, ctx.temperature = logits.shape, logits.dtype, true, temperature
        return torch.stack(values)

    @staticmethod
    def backward(ctx: Upstream, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        z, log_sum, index, here, *entropy = ctx.saved_tensors
        (gradient,) = gradients
        log_p = z - log_sum.unsqueeze(-1)
        p = log_p.exp()
        gradient_z = p * -gradient[0].unsqueeze(-1)
        if ctx.true:
            gradient_z.scatter_add_(-1, index, (gradient[0] * here).unsqueeze(-1))
        if entropy:
            gradient_z -= p.mul_(log_p.add_(entropy[0].unsqueeze(-1))).mul_(gradient[1].unsqueeze(-1))
        whole = torch.zeros(ctx.shape, dtype=ctx.dtype, device=z.device)
        whole[..., : ctx.true] = gradient_z.div_(ctx.temperature)
        return whole, None, None, None, None


def _divided(logits: Tensor, temperature: float) -> Tensor:
    """Divide into a new fp32 tensor."""
    if logits.dtype == torch.float32:
        return logits / temperature
    return logits.float().div_(temperature)
