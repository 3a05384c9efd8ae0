"""Prompts whose answers copy much of them, for prompt lookup: a summary and an edit."""

ARTICLE = """\
The harbour of Skelvik freezes for eleven weeks in most winters. In the old days the fishermen \
pulled their boats onto the shingle in November and mended nets until the ice broke. In 1962 \
the town council bought a small icebreaker, the Anna Maren, second hand from a paper mill. She \
had a steam engine, a crew of five, and a habit of stopping in the middle of the fairway. \
Still, from that winter on the harbour stayed open until Christmas, and the price of cod in \
Skelvik rose by a third, because fresh fish is scarce in December.

The steam engine was replaced by two diesel engines in 1971. The crew fell to three. The mate, \
Oddvar Lien, kept a log of the ice in a school exercise book, in pencil, every morning at six: \
thickness at the lighthouse, at the fish hall and at the mouth of the river, wind, and the \
temperature of the water at one metre. He kept it for thirty-four years without a gap, except \
for nine days in 1983 when he had pneumonia and his daughter kept it for him.

Nobody asked for the log while Oddvar was alive. In 2009 a student of oceanography from \
Tromso, Ingrid Moe, found the exercise books in the attic of the harbour office. She scanned \
12,410 pages. The log shows that the ice at the lighthouse was on average fifty-one \
centimetres thick in the 1960s and nineteen centimetres in the 2000s, that it came eighteen \
days later, and that it left twenty-six days earlier. It also shows that the water at one \
metre had warmed first at the mouth of the river, years before anyone noticed it elsewhere.

The Anna Maren was sold in 2014. The council could no longer say why it should pay a crew of \
three to break ice that was not there. She carries tourists now, in summer, around the \
islands. The log is kept in the library of the university, in a box without acid, and a copy \
of its first page hangs in the fish hall of Skelvik, beside the price of cod.
"""

CODE = '''\
class Shelf:
    """Books of one shelf, by title."""

    def __init__(self, name, capacity):
        self.name = name
        self.capacity = capacity
        self.books = {}

    def add(self, title, author, year):
        if len(self.books) >= self.capacity:
            raise ValueError(f"shelf {self.name} is full")
        self.books[title] = (author, year)

    def remove(self, title):
        if title not in self.books:
            raise KeyError(f"no book {title} on shelf {self.name}")
        del self.books[title]

    def find_by_author(self, author):
        found = []
        for title, (name, year) in self.books.items():
            if name == author:
                found.append((year, title))
        return [title for year, title in sorted(found)]

    def find_by_year(self, first, last):
        found = []
        for title, (name, year) in self.books.items():
            if first <= year <= last:
                found.append((year, title))
        return [title for year, title in sorted(found)]

    def count(self):
        return len(self.books)

    def is_full(self):
        return len(self.books) == self.capacity
'''

SUMMARY_PROMPT = f"""\
Summarise this article by copying its most important sentence from every paragraph, word for word.

{ARTICLE}"""

EDIT_PROMPT = f"""\
Rename the method `count` to `num_books` in this Python class, and change nothing else. Answer \
with the whole class.

```python
{CODE}```"""
