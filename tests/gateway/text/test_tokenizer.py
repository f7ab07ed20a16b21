from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from gateway.errors import InvalidRequest
from gateway.ports import ChatMessage
from gateway.text.stream import TextStream
from gateway.text.tokenizer import ModelTextCodec, load_text_codec

LINES = ["the quick brown fox jumps over the lazy dog", "ďábelské kódy 🙂🙂", "def f(x):\n    return x + 1\n"]
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_level_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(LINES, trainer)
    tokenizer.add_tokens([AddedToken("<töol>", special=False)])
    return tokenizer


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    byte_level_tokenizer().save(str(tmp_path / "tokenizer.json"))
    config = {"eos_token": {"content": "<|im_end|>"}, "bos_token": "<|im_start|>", "chat_template": TEMPLATE}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 0}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 2]}))
    return tmp_path


@pytest.fixture
def codec(model_dir: Path) -> ModelTextCodec:
    return load_text_codec(model_dir)


@pytest.mark.parametrize("text", [*LINES, "👨‍👩‍👧‍👦 क्षत्रिय \r\n\u2028\x00\U00020bb7 \ufffd", " leading and trailing "])
def test_ids_and_bytes_round_trip(codec: ModelTextCodec, text: str) -> None:
    ids = codec.encode(text)
    assert codec.decode(ids) == text
    assert b"".join(codec.token_bytes(token_id) for token_id in ids) == text.encode()
    stream = TextStream(codec)
    assert "".join(stream.push(token_id)[0] for token_id in ids) + stream.finish() == text


def test_every_byte_has_its_token(codec: ModelTextCodec) -> None:
    singles = {codec.token_bytes(token_id) for token_id in range(codec.vocab_size)}
    assert {bytes([value]) for value in range(256)} <= singles


def test_decode_agrees_with_the_library_on_any_ids(codec: ModelTextCodec, model_dir: Path) -> None:
    library = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    for start in range(codec.vocab_size - 7):
        ids = [(start * 37 + step * 101) % (codec.vocab_size - 1) for step in range(7)]
        for skip in (True, False):
            assert codec.decode(ids, skip_special_tokens=skip) == library.decode(ids, skip_special_tokens=skip)


def test_special_tokens_are_recognised_hidden_and_literal(codec: ModelTextCodec) -> None:
    ids = codec.encode("<|im_start|>hi<|im_end|>")
    assert ids[0] == 1
    assert ids[-1] == 2
    assert codec.decode(ids) == "hi"
    assert codec.decode(ids, skip_special_tokens=False) == "<|im_start|>hi<|im_end|>"
    assert codec.token_bytes(2) == b"<|im_end|>"
    assert codec.special_ids == {0, 1, 2}


def test_an_added_token_outside_the_byte_alphabet_is_its_literal_text(codec: ModelTextCodec) -> None:
    ids = codec.encode("a<töol>b")
    assert codec.decode(ids) == "a<töol>b"
    assert "<töol>".encode() in [codec.token_bytes(token_id) for token_id in ids]


def test_ids_of_a_padded_vocabulary_are_no_text(codec: ModelTextCodec) -> None:
    assert codec.token_bytes(codec.vocab_size + 5) == b""
    assert codec.token_bytes(-1) == b""


def test_eos_ids_come_from_all_three_files(codec: ModelTextCodec) -> None:
    assert codec.eos_ids == {0, 2}


def test_chat_is_rendered_and_encoded(codec: ModelTextCodec) -> None:
    ids = codec.render_chat([ChatMessage(role="user", content="the fox")])
    text = codec.decode(ids, skip_special_tokens=False)
    assert text == "<|im_start|>user\nthe fox<|im_end|>\n<|im_start|>assistant\n"
    assert ids[0] == 1


def test_a_template_file_wins_over_the_config(model_dir: Path) -> None:
    (model_dir / "chat_template.jinja").write_text("{{ bos_token }}{{ messages[0].content }}")
    codec = load_text_codec(model_dir)
    ids = codec.render_chat([ChatMessage(role="user", content="x")])
    assert codec.decode(ids, skip_special_tokens=False) == "<|im_start|>x"


def test_named_templates_use_the_default(model_dir: Path) -> None:
    config = {"chat_template": [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]}
    (model_dir / "tokenizer_config.json").write_text(json.dumps(config))
    codec = load_text_codec(model_dir)
    assert codec.decode(codec.render_chat([ChatMessage(role="user", content="x")])) == "yes"


def test_a_base_model_without_template_gets_plain_lines(model_dir: Path) -> None:
    (model_dir / "tokenizer_config.json").unlink()
    codec = load_text_codec(model_dir)
    assert codec.decode(codec.render_chat([ChatMessage(role="user", content="x")])) == "user: x\nassistant:"


def test_byte_fallback_vocabulary(tmp_path: Path) -> None:
    # B-1: emoji of one byte per token.
    vocab = {"<unk>": 0, **{f"<0x{value:02X}>": value + 1 for value in range(256)}, "▁hi": 257, "▁": 258}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    codec = load_text_codec(tmp_path)
    stream = TextStream(codec)
    ids = [257, *(value + 1 for value in "🙂🙂".encode())]
    deltas = [stream.push(token_id)[0] for token_id in ids]
    assert deltas == [" hi", "", "", "", "🙂", "", "", "", "🙂"]
    assert codec.decode(ids) == " hi🙂🙂"


def test_a_missing_tokenizer_is_told(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json"):
        load_text_codec(tmp_path)


def test_an_unknown_decoder_is_refused(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match="neither byte-level nor byte-fallback"):
        load_text_codec(tmp_path)


def test_a_refusing_template_is_the_clients_error(model_dir: Path) -> None:
    (model_dir / "chat_template.jinja").write_text("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        load_text_codec(model_dir).render_chat([ChatMessage(role="user", content="x")])
