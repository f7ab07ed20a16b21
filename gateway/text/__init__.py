"""Tokenizer, chat template, incremental detokenization, stop strings. Part of the gateway, floor 2."""

from gateway.text.stream import TextStream
from gateway.text.tokenizer import ModelTextCodec, load_text_codec

__all__ = ["ModelTextCodec", "TextStream", "load_text_codec"]
