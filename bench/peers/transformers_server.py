"""transformers' generate as `kvtide bench serve` asks it: chat completions over HTTP, streamed, one at a time.

Each `user` of a request is a session and keeps its DynamicCache; of a new prompt only what follows the common prefix
is computed. When all caches together are larger than --cache-bytes, the session asked longest ago loses its own.
"""

import argparse
import json
from collections import OrderedDict
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache


class Kept(NamedTuple):
    """What a session leaves behind."""

    tokens: list[int]  # that the cache has
    cache: DynamicCache

    @property
    def bytes(self) -> int:
        """Of keys and values."""
        return sum(part.nbytes for layer in self.cache.layers for part in (layer.keys, layer.values))


class Stream:
    """What generate calls with the prompt and then with each token: new text goes to `send`."""

    def __init__(self, tokenizer: Any, send: Any) -> None:
        self.tokens: list[int] = []
        self._tokenizer, self._send = tokenizer, send
        self._sent, self._begun = "", False

    def put(self, tokens: torch.Tensor) -> None:
        if not self._begun:  # the prompt
            self._begun = True
            return
        self.tokens += tokens.flatten().tolist()
        self._flush(whole=False)

    def end(self) -> None:
        self._flush(whole=True)

    def _flush(self, whole: bool) -> None:
        text = self._tokenizer.decode(self.tokens, skip_special_tokens=True)
        if text.endswith("\ufffd") and not whole:
            return  # a character's first bytes
        if new := text[len(self._sent) :]:
            self._send(new)
        self._sent = text


class Sessions:
    """The model and the caches, the one used last at the end."""

    def __init__(self, folder: str, dtype: str, cache_bytes: int) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
        self._limit = cache_bytes
        self._kept: OrderedDict[str, Kept] = OrderedDict()

    def answer(self, session: str, messages: list[dict[str, str]], max_tokens: int, send: Any) -> dict[str, int]:
        """Generate greedily, `send` each new piece of text; returns the usage."""
        chat = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        prompt = self._tokenizer(chat, add_special_tokens=False)["input_ids"]
        tokens, cache = self._kept.pop(session, Kept([], DynamicCache(config=self._model.config)))
        pairs = enumerate(zip(tokens, prompt, strict=False))
        same = next((at for at, (old, new) in pairs if old != new), len(tokens))
        same = min(same, len(prompt) - 1)  # the last token's logits are needed
        if removed := len(tokens) - same:
            cache.crop(-removed)
        stream = Stream(self._tokenizer, send)
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            output = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                cache=cache,
                max_new_tokens=max_tokens,
                do_sample=False,
                streamer=stream,
                pad_token_id=self._tokenizer.eos_token_id,
            )
        self._kept[session] = Kept(output[0, : cache.get_seq_length()].tolist(), cache)
        while sum(each.bytes for each in self._kept.values()) > self._limit:
            self._kept.popitem(last=False)
        return {"prompt_tokens": len(prompt), "completion_tokens": len(stream.tokens), "cached_tokens": same}


class Handler(BaseHTTPRequestHandler):
    """GET anything: ready. POST: a chat completion, streamed; the connection's end is the answer's."""

    sessions: Sessions

    def do_GET(self) -> None:
        self._begin()

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self._begin()

        def send(text: str) -> None:
            self._event({"choices": [{"index": 0, "delta": {"content": text}}]})

        usage = self.sessions.answer(body["user"], body["messages"], body["max_tokens"], send)
        self._event({"choices": [], "usage": usage})

    def _begin(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()

    def _event(self, chunk: dict[str, Any]) -> None:
        self.wfile.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")

    def log_message(self, format: str, *arguments: Any) -> None:
        """Say nothing of each request."""


def main() -> None:
    """Serve until the process is ended."""
    parser = argparse.ArgumentParser()
    for name, kind in {
        "model": str,
        "dtype": str,
        "threads": int,
        "cache-bytes": int,
        "host": str,
        "port": int,
    }.items():
        parser.add_argument(f"--{name}", type=kind, required=True)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    Handler.sessions = Sessions(options.model, options.dtype, options.cache_bytes)
    HTTPServer((options.host, options.port), Handler).serve_forever()


main()
