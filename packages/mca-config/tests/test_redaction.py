"""Secrets are removed from messages, and from standard error; what resembles them stays."""

import io
import pickle

import pytest

from mca_config.errors import McaError, UsageError, list_problems, raise_problems, raising_usage_errors
from mca_config.fields import cast
from mca_config.redaction import redacted, redacted_values
from mca_config.streams import SafeStream
from mca_config.yaml_text import parse

TOKEN = "hf_" + "a1B2" * 9

SECRETS = {
    "https://me:secret@host/a.jsonl": "https://...@host/a.jsonl",
    "https://secret@host/a.jsonl": "https://...@host/a.jsonl",
    "https://me:sec@ret@host/a.jsonl": "https://...@host/a.jsonl",
    "https://host:8080/a.jsonl?sig=secret": "https://host:8080/a.jsonl",
    "https:/me:secret@host/a?sig=secret": "https:/...@host/a",  # as pathlib writes it
    "simplecache::https://me:secret@h/a?b#c": "simplecache::https://...@h/a",
    "s3://me:secret@host/a.jsonl": "s3://me:...@host/a.jsonl",
    "s3://bucket/a.jsonl?X-Amz-Signature=secret&v=1": "s3://bucket/a.jsonl?X-Amz-Signature=...&v=1",
    "not 's3://key:sec": "not 's3://key:...",  # cut off
    "https://h/a?Signature=secret, https://h/b?c=d: 'https://h/c?e'": "https://h/a, https://h/b: 'https://h/c'",
    "401, url='https://h/a?sig=secret'": "401, url='https://h/a'",
    "Max retries exceeded with url: /a?b=secret (Caused by X)": "Max retries exceeded with url: /a (Caused by X)",
    "//me:secret@host: no route": "//me:...@host: no route",
    "{'Authorization': 'Bearer secret'}": "{'Authorization': 'Bearer ...",
    f"logged in with {TOKEN}": "logged in with hf_...",
}
KEPT = (
    "s3://b/a?#1.jsonl",
    "abfs://box@host/a",
    "hf://datasets/o/n@main/a",
    "/data/a?b:c@d.jsonl",
    "https://host:8080: there is no such file",
    "s3://bucket: there is no such file",
    "memory://rows/a.jsonl, row 3: bad",
    "hf_attention_implementation",
)


@pytest.mark.parametrize("text", SECRETS)
def test_secrets_are_removed_wherever_a_message_goes(text):
    found = redacted(text)
    assert found == SECRETS[text] == redacted(found)
    assert str(UsageError(text)) == str(pickle.loads(pickle.dumps(McaError(text)))) == found
    assert list_problems(ValueError(text)) == (found,)
    with pytest.raises(McaError) as caught:
        raise_problems([text, text], "run.yaml")
    assert caught.value.problems == (found, found)
    assert str(caught.value) == f"run.yaml: 2 problems\n  {found}\n  {found}"
    stream = io.StringIO()
    SafeStream(stream, redacts=True).write(text)
    assert stream.getvalue() == found


def test_what_resembles_a_secret_stays():
    assert [redacted(text) for text in KEPT] == list(KEPT)


def test_the_values_of_a_configuration_are_redacted_at_any_depth():
    values = {"hub_token": "abc", "push_to_hub_token": None, "n": 1, "d": [{"path": "https://h/a?s=secret"}]}
    expected = {"hub_token": "...", "push_to_hub_token": None, "n": 1, "d": [{"path": "https://h/a"}]}
    assert redacted_values(values) == expected


def test_no_message_quotes_a_token_that_a_file_holds():
    with pytest.raises(ValueError, match=r"line 2, column 15$") as caught:
        parse("a: 1\nhub_token: abc: def")
    assert "abc" not in str(caught.value)
    with pytest.raises(UsageError, match=r"^hub_token must be ") as caught:
        cast("hub_token", ["abc"], int, words=True)
    assert "abc" not in str(caught.value)


def test_a_converted_usage_error_has_one_traceback() -> None:
    with pytest.raises(UsageError, match="wrong key") as error, raising_usage_errors():
        raise McaError("wrong key")
    assert "wrong key" not in str(error.value.__cause__)
    assert error.value.__suppress_context__
