from handmade_cases import HANDMADE_CASES
from timm_cases import TIMM_CASES
from torchvision_cases import TORCHVISION_CASES
from transformers_cases import TRANSFORMERS_CASES

MODEL_CASES = [
    *TORCHVISION_CASES,
    *TIMM_CASES,
    *TRANSFORMERS_CASES,
    *HANDMADE_CASES,
]
