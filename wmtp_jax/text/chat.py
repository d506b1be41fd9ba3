"""Chat templates: how a model's turns become one prompt."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from wmtp_jax.errors import UserError

Message = Mapping[str, Any]
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")


@dataclass(frozen=True, kw_only=True)
class ChatTemplate:
    """A checkpoint's Jinja template and the special tokens it may name."""

    source: str
    special_tokens: Mapping[str, str] = field(default_factory=dict)

    def render(self, messages: Sequence[Message], variables: Mapping[str, Any] | None = None) -> str:
        """The prompt that asks for the next turn. Templates come with checkpoints, so they run in a sandbox.

        ``variables`` are the template's own, as ``enable_thinking``. Raises UserError for a template that is wrong or
        that refuses the messages.
        """
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            return environment.from_string(self.source).render(
                {**(variables or {}), "messages": messages, "add_generation_prompt": True, **self.special_tokens}
            )
        except UserError:
            raise
        except (TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError) as error:
            raise UserError(f"the checkpoint's chat template fails: {error}") from None


def load_chat_template(folder: Path) -> ChatTemplate | None:
    """The template of a model folder: ``chat_template.jinja``, else the one inside a JSON file, else None."""
    settings = _read(folder / "tokenizer_config.json")
    source = _source(folder, settings)
    if source is None:
        return None
    found = {name: token_text(settings.get(name)) for name in _SPECIAL_TOKENS}
    return ChatTemplate(source=source, special_tokens={name: text for name, text in found.items() if text is not None})


def _source(folder: Path, settings: Mapping[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise UserError(f"{path}: not UTF-8 at byte {error.start}") from None
    stored = settings.get("chat_template") or _read(folder / "chat_template.json").get("chat_template")
    if isinstance(stored, list):
        named = {entry["name"]: entry["template"] for entry in stored}
        stored = named.get("default")
    return stored if isinstance(stored, str) else None


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path}: not JSON ({error})") from None
    if not isinstance(value, dict):
        raise UserError(f"{path}: not a JSON object")
    return value


def token_text(token: Any) -> str | None:
    """A special token's text, which is stored as it is or inside an object; None for anything else."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _to_json(value: Any, indent: int | None = None) -> str:
    """Plain JSON: Jinja's own filter escapes it for HTML."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> NoReturn:
    raise UserError(f"the checkpoint's chat template refuses the messages: {message}")
