"""CPU-only checkpoint converter of mca, without torch: `convert`, `verify`, `inspect`, `plan` and their results.

Exported names are imported on first use. The command ``mca-convert`` calls the same functions.
"""

from typing import TYPE_CHECKING

from mca_config.lazy_names import make_lazy_getattr

if TYPE_CHECKING:
    from mca_convert.api import ConversionResult, convert, inspect, plan, verify
    from mca_convert.compare import Comparison, TensorDifference
    from mca_convert.forecast import ConversionPlan, PlannedStage
    from mca_convert.inspection import Inspection

__all__ = [
    "Comparison",
    "ConversionPlan",
    "ConversionResult",
    "Inspection",
    "PlannedStage",
    "TensorDifference",
    "convert",
    "inspect",
    "plan",
    "verify",
]

_HOME = {
    "Comparison": "compare",
    "ConversionPlan": "forecast",
    "ConversionResult": "api",
    "Inspection": "inspection",
    "PlannedStage": "forecast",
    "TensorDifference": "compare",
    "convert": "api",
    "inspect": "api",
    "plan": "api",
    "verify": "api",
}

__getattr__ = make_lazy_getattr(__name__, _HOME)
