"""A stub of llama-cpp-python with what `llamacpp_script.py` calls. Each next token is the last one plus 1."""

import ctypes
from pathlib import Path
from types import SimpleNamespace

__version__ = "0.0-stub"
VOCABULARY, END = 50, 49
llama_token = ctypes.c_int32
state = SimpleNamespace(last=0, seen=0)


class Llama:
    def __init__(self, file, n_ctx, n_batch, n_threads, n_threads_batch, verbose):
        assert Path(file).read_bytes()[:4] == b"GGUF"
        assert n_threads == n_threads_batch >= 1
        self.ctx, self.model, self.n_ctx = "context", "model", n_ctx

    def tokenize(self, text, add_bos, special):
        assert (add_bos, special) == (False, True)
        return list(text)


def llama_batch_get_one(tokens, count):
    return list(tokens)[:count]


def llama_decode(context, batch):
    state.last, state.seen = batch[-1], state.seen + len(batch)
    return 0


def llama_sampler_sample(sampler, context, index):
    return (state.last + 1) % VOCABULARY


def llama_get_logits_ith(context, index):
    state.logits = (ctypes.c_float * VOCABULARY)(*range(VOCABULARY))
    return ctypes.cast(state.logits, ctypes.POINTER(ctypes.c_float))


def llama_memory_clear(memory, data):
    state.seen = 0


def llama_vocab_is_eog(vocabulary, token):
    return token == END


def llama_vocab_n_tokens(vocabulary):
    return VOCABULARY


def llama_model_get_vocab(model):
    return "vocabulary"


def llama_get_memory(context):
    return "memory"


def llama_sampler_init_greedy():
    return "sampler"
