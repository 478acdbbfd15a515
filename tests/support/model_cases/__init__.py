"""A table of models and ways of using them, and how the splitter takes each.

Sizes are small: every operation runs, and the whole table takes minutes.
"""

from model_cases.around_forward import AROUND
from model_cases.call_forms import RESULTS
from model_cases.layer_kinds import KINDS
from model_cases.library_models import LIBRARY_CASES
from model_cases.live_tensors import LIVE
from model_cases.parameter_forms import PARAMETERS
from model_cases.tail_state import STATE

MODEL_CASES = [
    *LIBRARY_CASES,
    *LIVE,
    *KINDS,
    *RESULTS,
    *PARAMETERS,
    *STATE,
    *AROUND,
]
