"""Pages for people: boards, submissions, comparisons, and episodes turn by turn."""
