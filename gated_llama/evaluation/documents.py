"""Documents as tasks want them, for `process_docs` of task files."""

from datasets import Dataset


OPENING = 4000  # bytes of UTF-8, so that no language has longer ones than another


def openings(dataset: Dataset) -> Dataset:
    """The beginning of each document, about a thousand tokens of English: a quick look at many documents."""
    field = "text" if "text" in dataset.column_names else "page"
    return dataset.map(lambda doc: {field: doc[field].encode()[:OPENING].decode(errors="ignore")})
