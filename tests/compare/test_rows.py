from cpt.compare.rows import Row, Topic, differing, known


def test_what_is_not_known_is_no_difference():
    assert not Row("a", ("1", None, "1")).differs and Row("a", ("1", None, "2")).differs
    assert Row("a", ("1", None)).shown() == ["1", "?"]


def test_a_topic_keeps_what_differs_or_what_is_known():
    same, other, unknown = Row("same", ("1", "1")), Row("other", ("1", "2")), Row("unknown", (None, None))
    assert differing("x", [same, other, unknown]).rows == (other,) and known("x", [same, other, unknown]).rows == (
        same,
        other,
    )


def test_a_topic_with_a_remark_is_not_empty():
    assert Topic("x", ()).is_empty and not Topic("x", (), ("a remark",)).is_empty
