"""The names of secrets: of variables, keys in JSON, options of commands, parameters and headers."""

from __future__ import annotations

import re
from functools import lru_cache
from urllib.parse import unquote

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_LONGEST = 200  # only the end of a longer name is read, because it says what the value is


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# These are secret however the words around them are divided, and wherever they stand.
_CERTAIN = re.compile(
    r"""secret|passw|passphrase|passcode|credential|authorization|webhook|cookie|bearer
    | shared_?access | amz_signature | conn(?:ection)?_?str(?:ing)?s?(?![a-z])
    | (?:access|account|api|auth|deploy|encryption|master|private|secret|service|shared
        |signing|ssh|storage)_?keys?(?![a-z])""",
    re.VERBOSE,
)
_WORDS = _words("auth authn creds cred jwt oauth otp passwd pwd sas")
_ENDINGS = ("auth", "token", "pwd", "pw", "pass")
_NO_ENDINGS = _words(
    "allpass bandpass bypass compass encompass highpass lowpass multipass overpass surpass "
    "trespass underpass"
)
# Words before "key", "token" and "pass" that make these ordinary terms of programmers and of
# language models.
_ORDINARY = {
    "key": _words(
        "answer attention batch cache column data dataset dict env event feature field foreign "
        "group hash hidden id idempotency image index input jax join kv label lookup loss map "
        "merge message metric monitor name object order output param parameter partition primary "
        "prng prompt public query random range record resource result rng route routing row score "
        "shard sort source state target text time topology unique value var variable"
    ),
    "token": _words(
        "audio beginning bos cls decoder end eos first forced image last mask max min n new next "
        "num pad per prompt sep separator special start stop unk video"
    ),
    "pass": _words(
        "all backward band by dry each first forward high last low one per second single"
    ),
    "pat": _words(""),
    "pw": _words("conv dw"),
}
# Words behind these that tell several secrets apart, or say how one is written ("b" is for Base64).
_SUFFIXES = _words(
    "b backup base data der dev development hex live new old pem prod production stage staging "
    "team test testing"
)
# Words after "token" that say that a number or a part of a model is meant.
_QUANTITIES = _words(
    "accuracy budget classifier count counts dim dropout embedding embeddings entropy error ids "
    "len length level limit loss mask mixing per perplexity position rate shift size type types"
)
# Trainers count and list tokens and keys, so plurals are secret only behind these words.
_OWNERS = _words(
    "access api auth bearer github gitlab hf hub openai private refresh secret session signing "
    "ssh wandb"
)
# The last words of names that say where a secret is kept, or of what kind it is. Plans show their
# values, since a reader looks for them.
_REFERENCES = _words(
    "arn arns config dir enabled expiration file ids method mode name names path policy "
    "provider ref refs required seconds ttl type uri url version"
)
_NOT_SECRET = frozenset({"imagePullSecrets", "serviceAccountToken"})
_FOLDERS = frozenset({"PWD", "OLDPWD"})  # variables of a shell; elsewhere PWD is a password
# Ends of names that are not plurals; and the characters with which a number of things is written.
_SINGULAR = ("ss", "as")
_NUMBER = "0123456789.,_kKmMbB"
_OF_PARAMETERS = frozenset({"key", "sig", "signature", "sas"})


def is_secret_name(name: str) -> bool:
    """Return whether a value is secret because of its name.

    Examples:
        >>> names = ("DB_PASS", "openaiKey", "max_tokens", "KEY_FRAMES", "author")
        >>> [is_secret_name(name) for name in names]
        [True, True, False, False, False]
    """
    return _is_secret(name[-_LONGEST:])


@lru_cache(maxsize=1024)  # only for short names: a name may be a megabyte of anything
def _is_secret(name: str) -> bool:
    words = _words_of(name)
    if not words or name.lstrip("-") in _NOT_SECRET:
        return False
    joined = "_".join(words)
    if words[-1] in _REFERENCES:
        return "webhook" in joined
    return (
        _CERTAIN.search(joined) is not None
        or not _WORDS.isdisjoint(words)
        or any(_ends_as_a_secret(word) for word in words)
        or _is_term(words)
    )


def is_secret_reference(name: str) -> bool:
    """Return whether a name says where a secret is kept: ``secretName``, ``token_file``."""
    words = _words_of(name)
    return len(words) > 1 and words[-1] in _REFERENCES and is_secret_name("_".join(words[:-1]))


def is_secret_term(name: str) -> bool:
    """Return whether the text behind a name and a colon is secret.

    It is not after "token-ablation-3", which is a run.
    """
    last = name.rpartition("-")[2]
    return is_secret_name(name) and (
        last == name or last.lower() in {"key", "id"} or is_secret_name(last)
    )


def is_count(name: str, value: str) -> bool:
    """Return whether a value is a number of secrets or tokens, rather than a secret."""
    words = _without_suffixes(_words_of(name))
    plural = bool(words) and words[-1].endswith("s") and not words[-1].endswith(_SINGULAR)
    return plural and value[:1].isdecimal() and not value.strip(_NUMBER)


def is_folder(name: str, value: str) -> bool:
    """Return whether a value is the working directory of a shell, in the variable for it."""
    return name in _FOLDERS and value.startswith(("/", "~"))


def is_secret_parameter(name: str) -> bool:
    """Return whether the value of a parameter of a URI is secret because of its name."""
    words = _words_of(name)
    return bool(words) and (words[-1] in _OF_PARAMETERS or is_secret_name(name))


def _words_of(name: str) -> list[str]:
    name = name[-_LONGEST:]
    return [word.lower() for word in _WORD.findall(unquote(name) if "%" in name else name)]


def _ends_as_a_secret(word: str) -> bool:
    return any(word.endswith(end) and word != end for end in _ENDINGS) and word not in _NO_ENDINGS


def _without_suffixes(words: list[str]) -> list[str]:
    while len(words) > 1 and words[-1] in _SUFFIXES:
        words = words[:-1]
    return words


def _is_term(words: list[str]) -> bool:
    """Return whether "key", "token" and so on mean a secret beside the other words."""
    *before_last, last = _without_suffixes(words)
    before = before_last[-1] if before_last else ""
    if last == "pw":
        return before not in _ORDINARY["pw"]
    if last in {"key", "pat"}:
        return before != "" and before not in _ORDINARY[last]
    if last in {"keys", "tokens"}:
        return before in _OWNERS or words == ["tokens"]
    if last == "pass":
        return before not in _ORDINARY["pass"]
    for number, word in enumerate(words):
        if word == "token":
            left = words[number - 1] if number else ""
            right = words[number + 1] if number + 1 < len(words) else ""
            return left not in _ORDINARY["token"] and right not in _QUANTITIES
    return False
