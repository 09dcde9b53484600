"""From a Hugging Face folder to a model."""

from pathlib import Path

from services.gpu_worker.model.config import read_config
from services.gpu_worker.model.llama import Llama
from services.gpu_worker.model.weights import DTYPES, Weights
from shared.errors import ModelError


def load_model(folder: Path, dtype: str = "bfloat16") -> Llama:
    """Read configuration and weights. dtype: float32, bfloat16 or float16. Raises ModelError."""
    if dtype not in DTYPES:
        raise ModelError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    config = read_config(folder)
    with Weights(folder, DTYPES[dtype]) as weights:
        return Llama(config, weights)
