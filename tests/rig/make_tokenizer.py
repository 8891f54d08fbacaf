"""A word-level tokenizer as a local folder that transformers can load: one word, one token. `make_tokenizer.py FOLDER`.

Run with the Python of a peer that brings transformers (aiperf, guidellm).
"""

import sys

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

words = ["<unk>", "<s>", "</s>", "<pad>", *(f"w{n}" for n in range(2000)), "hello", "the", "a", "of", "to", "and", "in"]
tokenizer = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="<unk>"))
tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
fast = PreTrainedTokenizerFast(
    tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="<pad>",
    model_max_length=131072,
)  # fmt: skip
fast.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
fast.save_pretrained(sys.argv[1])
