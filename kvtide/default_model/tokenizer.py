"""The tokenizer files of a Hugging Face folder, from the vocabulary in GGUF metadata."""

from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from shared.errors import ModelError

# The kinds of a token in `tokenizer.ggml.token_type`: normal pieces, and control tokens such as <|im_start|>.
NORMAL, CONTROL = 1, 3


def build_tokenizer(meta: dict[str, Any]) -> Tokenizer:
    """Build the byte-level BPE tokenizer of the "smollm" family: each digit is a piece of its own.

    `meta` maps GGUF keys to values. The Digits step is part of the model (the name "smollm" implies it) and not
    written in the metadata: without it "12" may become one token that the model never saw in training.

    Raises ModelError when the metadata describes another family.
    """
    for key, supported in (("tokenizer.ggml.model", "gpt2"), ("tokenizer.ggml.pre", "smollm")):
        if meta.get(key) != supported:
            raise ModelError(f"{key} is {meta.get(key)!r}, only {supported!r} is supported: use a Hugging Face folder")
    tokens: list[str] = meta["tokenizer.ggml.tokens"]
    kinds: list[int] = meta["tokenizer.ggml.token_type"]
    if unknown := set(kinds) - {NORMAL, CONTROL}:
        raise ModelError(f"token kinds {sorted(unknown)} are not supported: use a Hugging Face folder")
    first, second = zip(*(merge.split(" ", 1) for merge in meta["tokenizer.ggml.merges"]), strict=True)
    tokenizer = Tokenizer(
        BPE(vocab={token: id for id, token in enumerate(tokens)}, merges=list(zip(first, second, strict=True)))
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in _control(meta)])
    return tokenizer


def tokenizer_config(meta: dict[str, Any]) -> dict[str, Any]:
    """Return the contents of `tokenizer_config.json`: the special tokens' roles and the chat template.

    `PreTrainedTokenizerFast` makes loaders take `tokenizer.json` as it is; a named family (GPT2) would build a
    tokenizer of its own, without the Digits step.
    """
    tokens: list[str] = meta["tokenizer.ggml.tokens"]
    roles = {
        "bos_token": "tokenizer.ggml.bos_token_id",
        "eos_token": "tokenizer.ggml.eos_token_id",
        "pad_token": "tokenizer.ggml.padding_token_id",
        "unk_token": "tokenizer.ggml.unknown_token_id",
    }
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{role: tokens[meta[key]] for role, key in roles.items()},
        "add_bos_token": meta["tokenizer.ggml.add_bos_token"],
        "additional_special_tokens": _control(meta),
        "chat_template": meta["tokenizer.chat_template"],
        "clean_up_tokenization_spaces": False,
        "model_max_length": meta["llama.context_length"],
    }


def _control(meta: dict[str, Any]) -> list[str]:
    pairs = zip(meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.token_type"], strict=True)
    return [token for token, kind in pairs if kind == CONTROL]
