"""The small faults that can be planted in one source file, found by its syntax tree.

A `Mutation` replaces one span of one file. Its ``identity`` contains the text of the line, not its number, so a
mutation keeps its identity when lines above it change.
"""

import ast
import hashlib
from dataclasses import dataclass
from pathlib import Path

COMPARISONS: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.In: (" in ", " not in "),
    ast.NotIn: (" not in ", " in "),
    ast.Is: (" is ", " is not "),
    ast.IsNot: (" is not ", " is "),
}
ARITHMETIC: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.FloorDiv: ("//", "*"),
    ast.Pow: ("**", "*"),
}
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "barrier")
PARALLEL_AXES = {"tp": "cp", "cp": "tp", "pp": "tp", "ep": "tp", "etp": "ep", "dp": "cp", "dp_cp": "tp"}
DTYPES = {"float32": "bfloat16", "bfloat16": "float16", "float64": "float32", "int64": "int32"}
CALLS = {
    "min": "max",
    "max": "min",
    "any": "all",
    "all": "any",
    "mean": "sum",
    "sum": "mean",
    "cumsum": "cumprod",
}
DROPPED_KEYWORDS = ("group", "dim", "axis", "dtype", "mask", "keepdim", "reverse")
UNCHANGED_KEYWORDS = ("indent", "shown", "stacklevel", "strict")
"""Keywords whose value is left alone: the form of a text, or a guard against our own faults."""
UNSWAPPED = (
    *("isinstance", "issubclass", "getattr", "setattr", "hasattr", "partial", "map", "filter"),
    *("min", "max", "minimum", "maximum", "equal", "array_equal"),
)
"""Functions whose arguments are not exchanged: that fails at once, or changes nothing."""
_MESSAGES = ("logger", "warnings", "logging", "_log", "print")


@dataclass(frozen=True)
class Mutation:
    """One replaced span of one file.

    Attributes:
        path: The file, relative to the repository.
        function: Qualified name of the innermost function around it, as code objects have it.
        line: The line of the span, from 1.
        start: Offset of the span in the file's bytes.
        end: Offset of its end.
        text: The replacement.
        operator: The kind of fault: ``comparison``, ``dropped factor`` and so on.
        identity: Twelve hexadecimal digits, from the path, the function, the text and the operator.
        shown: The line before and after, for people.
    """

    path: str
    function: str
    line: int
    start: int
    end: int
    text: str
    operator: str
    identity: str
    shown: str

    def apply(self, source: bytes) -> bytes:
        """Return ``source`` with the fault."""
        return source[: self.start] + self.text.encode() + source[self.end :]


def mutations(root: Path, path: str) -> list[Mutation]:
    """Return every fault that can be planted in the functions of ``root / path``, in the order of the file."""
    source = (root / path).read_bytes()
    found = _File(path, source)
    found.visit(ast.parse(source))
    unique = {(each.start, each.end, each.text): each for each in found.mutations}
    return sorted(unique.values(), key=lambda each: (each.start, each.end, each.operator))


def compiles(source: bytes) -> bool:
    """Return whether ``source`` is valid Python: a replaced span may have lost its parentheses."""
    try:
        compile(source, "mutated", "exec")
    except SyntaxError:
        return False
    return True


class _File(ast.NodeVisitor):
    """Collect the mutations of one file."""

    def __init__(self, path: str, source: bytes) -> None:
        self.path = path
        self.source = source
        self.lines = source.splitlines(keepends=True)
        self.starts = [0]
        for line in self.lines:
            self.starts.append(self.starts[-1] + len(line))
        self.functions: list[ast.FunctionDef | ast.AsyncFunctionDef] = []
        self.scopes: list[str] = []
        self.mutations: list[Mutation] = []
        self.seen: dict[str, int] = {}

    # -- what is walked

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        """Walk the body; decorators, annotations, defaults and the docstring are left alone."""
        self._function(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        """Walk the body as that of any other function."""
        self._function(node)

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self.functions.append(node)
        self.scopes += [node.name, "<locals>"]
        body = node.body[1:] if ast.get_docstring(node, clean=False) is not None else node.body
        for statement in body:
            self.visit(statement)
        del self.scopes[-2:]
        self.functions.pop()

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        """Walk the methods."""
        self.scopes.append(node.name)
        self.generic_visit(node)
        self.scopes.pop()

    def visit_Raise(self, node: ast.Raise) -> None:
        """Skip: the text of a message is no number."""

    def visit_Assert(self, node: ast.Assert) -> None:
        """Skip: an assertion guards against our own faults."""

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Skip: an f-string is a message or a name."""

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        """Walk the value alone."""
        if node.value is not None:
            self.visit(node.value)

    def visit_Expr(self, node: ast.Expr) -> None:
        """Drop a call for its effect; skip calls that write messages."""
        if isinstance(node.value, ast.Call):
            name = ast.unparse(node.value.func)
            if name.split(".")[0] in _MESSAGES:
                return
            kind = "dropped collective" if name.rpartition(".")[2].startswith(COLLECTIVES) else "dropped call"
            self._add(node, "pass", kind)
        self.generic_visit(node)

    # -- what is replaced

    def visit_Compare(self, node: ast.Compare) -> None:
        """Replace one comparison by its neighbour."""
        left = node.left
        for operator, right in zip(node.ops, node.comparators, strict=True):
            old, new = COMPARISONS[type(operator)]
            self._between(left, right, old, new, "comparison")
            left = right
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        """Turn an operator around, or drop the right operand."""
        if isinstance(node.op, ast.Mod) and isinstance(node.left, ast.Constant):
            return  # a format
        if isinstance(node.left, ast.JoinedStr):
            return  # a message in parts
        if pair := ARITHMETIC.get(type(node.op)):
            self._between(node.left, node.right, *pair, "arithmetic")
        name = {ast.Mult: "factor", ast.Div: "factor", ast.Add: "term", ast.Sub: "term", ast.BitAnd: "mask"}
        if dropped := name.get(type(node.op)):
            self._add(node, self._text(node.left), f"dropped {dropped}")
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        """Exchange ``and`` and ``or``."""
        old, new = (" and ", " or ") if isinstance(node.op, ast.And) else (" or ", " and ")
        for left, right in zip(node.values, node.values[1:], strict=False):
            self._between(left, right, old, new, "condition")
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        """Drop ``not``, ``~`` and the minus of an expression."""
        if not isinstance(node.operand, ast.Constant):
            self._add(node, f"({self._text(node.operand)})", "dropped sign or not")
        elif isinstance(node.op, ast.USub) and isinstance(node.operand.value, int):
            self._add(node, str(node.operand.value), "axis or index")
            return
        self.generic_visit(node)

    def visit_If(self, node: ast.If) -> None:
        """Take a branch always or never."""
        self._add(node.test, "True", "branch always")
        self._add(node.test, "False", "branch never")
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        """Take the first or the second value always."""
        self._add(node.test, "True", "branch always")
        self._add(node.test, "False", "branch never")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        """Add one to an integer, turn a boolean around, exchange a parallel axis."""
        value = node.value
        if isinstance(value, bool):
            self._add(node, str(not value), "boolean")
        elif isinstance(value, int):
            self._add(node, str(value + 1), "off by one")
        elif isinstance(value, str) and value in PARALLEL_AXES:
            self._add(node, repr(PARALLEL_AXES[value]), "wrong group")

    def visit_keyword(self, node: ast.keyword) -> None:
        """Walk the value, unless results do not depend on it."""
        if node.arg not in UNCHANGED_KEYWORDS:
            self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        """Exchange a parallel axis or a dtype."""
        end = self._offset(node.end_lineno, node.end_col_offset)
        for table, kind in ((PARALLEL_AXES, "wrong group"), (DTYPES, "wrong dtype")):
            if (new := table.get(node.attr)) and isinstance(node.ctx, ast.Load):
                self._span(node, end - len(node.attr), end, new, kind)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        """Drop a keyword, exchange two arguments, or call the opposite function."""
        if ast.unparse(node.func).split(".")[0] in _MESSAGES:
            return
        for keyword in node.keywords:
            if keyword.arg in DROPPED_KEYWORDS:
                self._add(
                    keyword, f"**dict({keyword.arg}={self._text(keyword.value)}) and {{}}", "dropped keyword"
                )
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        first = node.args[:2]
        if (
            len(first) == 2
            and name not in UNSWAPPED
            and not any(isinstance(each, ast.Starred | ast.Constant) for each in first)
        ):
            left, right = (self._text(each) for each in first)
            span = self._at(first[0]), self._offset(first[1].end_lineno, first[1].end_col_offset)
            self._span(node, *span, f"{right}, {left}", "exchanged arguments")
        if new := CALLS.get(name):
            end = self._offset(node.func.end_lineno, node.func.end_col_offset)
            self._span(node, end - len(name), end, new, "opposite function")
        self.generic_visit(node)

    # -- spans

    def _offset(self, line: int | None, column: int | None) -> int:
        assert line is not None and column is not None
        return self.starts[line - 1] + column

    def _at(self, node: ast.expr | ast.stmt | ast.keyword) -> int:
        return self._offset(node.lineno, node.col_offset)

    def _text(self, node: ast.expr) -> str:
        return self.source[self._at(node) : self._offset(node.end_lineno, node.end_col_offset)].decode()

    def _between(self, left: ast.expr, right: ast.expr, old: str, new: str, kind: str) -> None:
        start, end = self._offset(left.end_lineno, left.end_col_offset), self._at(right)
        at = self.source.find(old.strip().encode(), start, end)
        if at >= 0:
            self._span(left, at, at + len(old.strip()), new.strip(), kind)

    def _add(self, node: ast.expr | ast.stmt | ast.keyword, text: str, kind: str) -> None:
        self._span(node, self._at(node), self._offset(node.end_lineno, node.end_col_offset), text, kind)

    def _span(
        self, node: ast.expr | ast.stmt | ast.keyword, start: int, end: int, text: str, kind: str
    ) -> None:
        if not self.functions:
            return
        function = self.functions[-1]
        line = self.source.count(b"\n", 0, start) + 1
        old = self.source[start:end].decode()
        shown = f"{' '.join(old.split())} -> {text}  in  {self.lines[line - 1].decode().strip()}"
        key = f"{self.path}|{function.name}|{kind}|{shown}"
        number = self.seen[key] = self.seen.get(key, 0) + 1
        identity = hashlib.sha256(f"{key}|{number}".encode()).hexdigest()[:12]
        qualified = ".".join(self.scopes[:-1])
        self.mutations.append(Mutation(self.path, qualified, line, start, end, text, kind, identity, shown))
