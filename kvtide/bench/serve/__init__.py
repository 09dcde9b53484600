"""Chats that come back, served by kvtide, by llama-cpp-python's server and by transformers."""
