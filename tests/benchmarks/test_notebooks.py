from nbformat.v4 import new_output

from benchmarks.notebooks import joined, kept


def printed(text):
    return new_output("stream", name="stdout", text=text)


def test_lines_of_a_run_are_kept_without_what_only_this_machine_has():
    line = "base  step 50/127  0:15 to go  loss 6.1750  gradient norm 0.35  4,773 tokens/s  host 0.6 GiB\n"
    assert kept(printed(line)).text == "base  step 50/127  loss 6.1750  gradient norm 0.35\n"
    assert kept(printed("/usr/local/lib/python3.11/csv.py: a module")).text == ".../lib/python3.11/csv.py: a module"


def test_what_rich_prints_is_kept_as_text_and_a_picture_as_it_is():
    table = new_output("display_data", data={"text/html": "<b>a</b>", "text/plain": "a\n"})
    picture = new_output("display_data", data={"image/png": "iVBO", "text/plain": "<Figure>"})
    assert kept(table).text == "a\n" and kept(picture) == picture


def test_what_was_printed_bit_by_bit_is_one_text():
    picture = new_output("display_data", data={"image/png": "iVBO"})
    whole = joined([printed("a"), printed("b"), picture, printed("c")])
    assert [output.get("text") for output in whole] == ["ab", None, "c"]
