"""What the gateway reads from the model's folder: tokenizer, chat template, context, end tokens, sampling defaults."""

from pathlib import Path
from typing import Any, TypeVar

import msgspec
from tokenizers import Tokenizer

from services.gateway.chat_template import ChatTemplate
from services.gateway.vocabulary import Vocabulary
from shared.config import Config
from shared.errors import ModelError

OPENAI_TEMPERATURE = 1.0  # where neither the request nor generation_config.json says one

T = TypeVar("T", bound=msgspec.Struct)
Token = str | dict[str, Any] | None  # a special token: its text or an AddedToken


class _Text(msgspec.Struct):
    max_position_embeddings: int = 0
    vocab_size: int = 0
    eos_token_id: int | list[int] | None = None


class _ConfigFile(_Text):
    text_config: _Text | None = None  # of multimodal models


class _NamedTemplate(msgspec.Struct):
    name: str
    template: str


class _TokenizerConfig(msgspec.Struct):
    chat_template: str | list[_NamedTemplate] | None = None
    bos_token: Token = None
    eos_token: Token = None
    pad_token: Token = None
    unk_token: Token = None


class Defaults(msgspec.Struct, frozen=True):
    """Sampling where the request says nothing: generation_config.json's, as vLLM and SGLang have it."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    eos_token_id: int | list[int] | None = None


class Model:
    """The served model as the API sees it."""

    def __init__(self, config: Config) -> None:
        """Raises ModelError naming the file that is missing or can't be read, and what to do."""
        if not config.model.path:
            raise ModelError("no model is configured: set model.path to a Hugging Face folder")
        self.folder = folder = Path(config.model.path)
        about = _read(folder / "config.json", _ConfigFile)
        text = about if about.max_position_embeddings or about.text_config is None else about.text_config
        own_context = text.max_position_embeddings
        if not own_context and not config.model.max_context:
            raise ModelError(f"{folder}/config.json has no max_position_embeddings: set model.max_context")
        self.name = config.model.name or folder.name
        self.context = min(filter(None, (own_context, config.model.max_context)))  # tokens
        self.defaults = _read(folder / "generation_config.json", Defaults, optional=True)
        self.stop_token_ids = _ids(self.defaults.eos_token_id) or _ids(text.eos_token_id) or _ids(about.eos_token_id)
        self.tokenizer = _tokenizer(folder / "tokenizer.json", text.vocab_size)
        self.vocab_size = text.vocab_size or self.tokenizer.get_vocab_size()
        self.vocabulary = Vocabulary(self.tokenizer, folder / "tokenizer.json")
        self.chat_template = _chat_template(folder)


def _tokenizer(file: Path, vocab_size: int) -> Tokenizer:
    if not file.is_file():
        raise ModelError(
            f"{file} is missing: copy it from the model's page, or let transformers make it from tokenizer.model with "
            "AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
        )
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises nothing more precise
        raise ModelError(f"can't read {file}: {error}; download it again") from None
    last = max(tokenizer.get_vocab().values(), default=0)
    if vocab_size and last >= vocab_size:
        raise ModelError(
            f"{file} has token ids up to {last}, the model in config.json knows {vocab_size} (vocab_size): they are of "
            "different models, or a token was added to one of them; download both again"
        )
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _chat_template(folder: Path) -> ChatTemplate | None:
    about = _read(folder / "tokenizer_config.json", _TokenizerConfig, optional=True)
    file = folder / "chat_template.jinja"
    try:
        source = file.read_text(encoding="utf-8") if file.is_file() else about.chat_template
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"can't read {file}: {error}; download it again") from None
    if isinstance(source, list):
        source = next((named.template for named in source if named.name == "default"), None)
    if source is None:
        return None
    names = ("bos_token", "eos_token", "pad_token", "unk_token")
    tokens = {name: getattr(about, name) for name in names}
    return ChatTemplate(source, {name: _text(token) for name, token in tokens.items() if token is not None})


def _text(token: str | dict[str, Any]) -> str:
    return token if isinstance(token, str) else str(token.get("content", ""))


def _ids(value: int | list[int] | None) -> list[int]:
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


def _read(file: Path, kind: type[T], optional: bool = False) -> T:
    try:
        return msgspec.json.decode(file.read_bytes(), type=kind)
    except FileNotFoundError:
        if optional:
            return kind()
        raise ModelError(f"{file} is missing: set model.path to a Hugging Face folder") from None
    except (OSError, msgspec.DecodeError) as error:
        raise ModelError(f"can't read {file}: {error}") from None
