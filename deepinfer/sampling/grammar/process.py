"""The grammar process: compiles forms that users wrote, where a bad one can take neither the engine nor its memory.

Run as ``python -m deepinfer.sampling.grammar.process``; it speaks the protocol of ``protocol.py`` and ends when its
input ends.
"""

from __future__ import annotations

import json
import os
import resource
import sys

from deepinfer.sampling.grammar import library
from deepinfer.sampling.grammar.library import GrammarError
from deepinfer.sampling.grammar.protocol import Greeting, Reply


def main() -> None:
    """Greet, then answer one line per line."""
    # What the library prints must not stand between the replies.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    greeting: Greeting = json.loads(sys.stdin.readline())

    def answer(reply: Reply) -> None:
        answers.write(json.dumps(reply) + "\n")
        answers.flush()

    try:
        xgrammar = library.load()
    except GrammarError as error:
        answer({"compiled": None, "problem": str(error)})
        return
    vocabulary = [bytes.fromhex(each) for each in greeting["vocabulary"]]
    described = library.describe_vocabulary(xgrammar, vocabulary, greeting["vocab_size"], greeting["end_token_ids"])
    compiler = xgrammar.GrammarCompiler(described, max_threads=1, cache_enabled=False)
    limit = greeting["address_space_bytes"]
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    answer({"compiled": None, "problem": ""})
    for line in sys.stdin:
        kind, text = json.loads(line)
        try:
            compiled = library.compile_source(compiler, kind, text)
            answer({"compiled": compiled.serialize_json(), "problem": ""})
        except GrammarError as error:
            answer({"compiled": None, "problem": str(error)})


if __name__ == "__main__":
    main()
