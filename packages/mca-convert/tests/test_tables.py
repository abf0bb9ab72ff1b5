"""Tables of the command line."""

from mca_convert.output import table


def test_columns_of_numbers_are_aligned_to_the_right():
    rows = [("a", "1 KB", "3 x"), ("long", "12 KB", "x"), ("b", "7 KB", "44 x")]
    assert list(table(("name", "size", "mixed"), rows)) == [
        "name   size  mixed",
        "a      1 KB  3 x",
        "long  12 KB  x",
        "b      7 KB  44 x",
    ]
