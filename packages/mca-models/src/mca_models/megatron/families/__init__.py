"""What families need beyond Megatron's own layers, chosen by the fields of ``McaModelConfig``, never by name."""

from mca_models.megatron.families.limits import problems
from mca_models.megatron.families.scales import add_scales
from mca_models.megatron.families.settings import after_building, settings
from mca_models.megatron.families.spec import adapted, adapted_block
from mca_models.megatron.families.two_ropes import TwoRopes

__all__ = ["TwoRopes", "adapted", "adapted_block", "add_scales", "after_building", "problems", "settings"]
