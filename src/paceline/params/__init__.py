"""The parameter space: all trainable tensors of a run in one flat range per dtype.

What lies where is decided in `paceline.core` (`layout.py`, `placement.py`); here is what needs torch:

* `flat.py`      reads a Layout off a torch model, and makes tensor views into flat memory.
* `state_book.py` StateBook: parameters and optimizer state as named pieces, for checkpoints.
* `fused.py`     torch's fused optimizer kernels, made to take what the plain ones take.
* `numerics.py`  Numerics: settings of torch that change what an optimizer computes.
* `optimizer_spec.py` OptimizerSpec: an optimizer as plain data, and which of them may be cut into pieces.
"""

from paceline.core.layout import Layout, Segment, Slice, TensorInfo, partition
from paceline.core.placement import Placement
from paceline.params.flat import (
    HasParameters,
    bind,
    bytes_of,
    describe,
    dtype_named,
    flat_view,
    not_finite,
    segment_view,
    tensor_views,
)
from paceline.params.fused import use_fused
from paceline.params.numerics import Numerics
from paceline.params.optimizer_spec import (
    GroupSettings,
    OptimizerSpec,
    Setting,
    as_json,
    checked_settings,
    settings_of,
)
from paceline.params.state_book import StateBook, apart

__all__ = [
    "GroupSettings",
    "HasParameters",
    "Layout",
    "Numerics",
    "OptimizerSpec",
    "Placement",
    "Segment",
    "Setting",
    "Slice",
    "StateBook",
    "TensorInfo",
    "apart",
    "as_json",
    "bind",
    "bytes_of",
    "checked_settings",
    "describe",
    "dtype_named",
    "flat_view",
    "not_finite",
    "partition",
    "segment_view",
    "settings_of",
    "tensor_views",
    "use_fused",
]
