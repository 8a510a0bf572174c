"""A board's database as what pages show, to whoever looks.

Everything that a page is told of a board passes here, and here it is asked who may see it (`visibility`). Knows nothing
of HTML or HTTP.
"""

import threading
from collections.abc import Iterator, Sequence
from typing import Final

from turngym_leaderboard.pages.board_ranking import WITH_RESULTS, BoardRanking, by_label, overall, rank_board
from turngym_leaderboard.pages.board_views import (
    board_row,
    column,
    environment_comparison,
    environment_result,
    episode_row,
    is_contestant,
    is_private,
    own_line,
    owner_of,
    place,
    price_unit,
    score_of,
    times_of,
    told_apart,
    waiting_row,
    when,
)
from turngym_leaderboard.pages.episode_list import PAGE
from turngym_leaderboard.pages.episodes import evaluated_view
from turngym_leaderboard.pages.views import (
    BoardLine,
    BoardView,
    ComparisonView,
    EpisodeFilter,
    EpisodeList,
    EpisodeRow,
    OwnLine,
    ShownEpisode,
    SubmissionView,
)
from turngym_leaderboard.store import NotFound, Store, boards, episodes, submissions
from turngym_leaderboard.store.episodes import Filter, Outcomes
from turngym_leaderboard.store.values import Board, Owner, Result, Submission
from turngym_leaderboard.visibility import EVERYBODY, Viewer, may_see_episode, may_see_listed, may_see_submission

_MOST_BESIDE: Final = 12
"""Other episodes of the same instance that are offered."""
_MOST_SHOWCASE: Final = 64 * 64
"""As many as a board may have."""
_SUCCESS: Final = {"solved": True, "failed": False}
_UNRESOLVED: Final = "unresolved"
_SEALED: Final = (
    "While the season lasts, only episodes that are not scored are shown: who had seen a sealed board’s worlds could "
    "train on them."
)


class BoardSource:
    """What there is to see in a store. May be shared by threads.

    All methods raise NotFound for what is not there, and in the same words for what this viewer may not see.

    Args:
        viewer: who looks.
    """

    def __init__(self, store: Store, viewer: Viewer = EVERYBODY) -> None:
        self._store = store
        self._viewer = viewer
        self._rankings: dict[str, tuple[object, BoardRanking]] = {}
        self._ranking = threading.Lock()

    def boards(self) -> tuple[BoardLine, ...]:
        """All boards, newest first."""
        return tuple(
            BoardLine(
                slug=board.slug,
                title=board.definition.title,
                season=board.definition.season,
                closed=when(board.closed),
                environments=tuple(environment.label for environment in board.environments),
                submissions=sum(is_contestant(each) and not is_private(each) for each in self._visible(board)),
            )
            for board in boards.every(self._store)
        )

    def own(self, owner: Owner) -> tuple[OwnLine, ...]:
        """The submissions of an owner, who looks, on all boards, newest first."""
        found = {board.id: board for board in boards.every(self._store)}
        return tuple(own_line(each, found[each.board_id]) for each in submissions.of_owner(self._store, owner))

    def board(self, slug: str) -> BoardView:
        """A board with all that may be seen of it."""
        board = boards.find(self._store, slug)
        visible = self._visible(board)
        results = self._results(board)
        ranking = self._ranked(board, visible, results)
        told = [results.get(each.id, {}) for each in visible]
        unit = price_unit([overall(board, each) for each in told])
        rows = [
            board_row(board, each, results.get(each.id, {}), ranking, unit)
            for each in visible
            if each.state in WITH_RESULTS
        ]
        definition = board.definition
        return BoardView(
            slug=board.slug,
            title=definition.title,
            season=definition.season,
            about=definition.about,
            sealed=definition.sealed,
            created=when(board.created),
            closed=when(board.closed),
            secret_hash=board.secret_hash,
            secret=board.secret or "",
            columns=tuple(column(environment, told) for environment in board.environments),
            rows=tuple(sorted(rows, key=place)),
            names=dict(told_apart([each for each in visible if each.state in WITH_RESULTS])),
            waiting=tuple(waiting_row(each, board) for each in visible if each.state not in WITH_RESULTS),
            detectable=ranking.detectable,
            price_unit=unit,
        )

    def submission(self, slug: str, public_id: str) -> SubmissionView:
        """A submission of a board."""
        board, submission = self._submission(slug, public_id)
        visible = self._visible(board)
        results = self._results(board)
        own = results.get(submission.id, {})
        choices = told_apart([each for each in visible if each.state in WITH_RESULTS])
        return SubmissionView(
            id=submission.public_id,
            board=board.slug,
            board_title=board.definition.title,
            name=submission.name,
            kind=submission.kind.value,
            owner=owner_of(submission),
            state=submission.state.value,
            reason=submission.reason_on(board),
            episodes=submission.episodes,
            total=submission.total,
            ranks=self._ranked(board, visible, results).ranks(submission.public_id),
            score=score_of(overall(board, own)),
            facts=tuple(sorted(submission.description.items())),
            times=times_of(submission),
            results=tuple(
                environment_result(environment, own[environment.label])
                for environment in board.environments
                if environment.label in own
            ),
            others=tuple(
                choice for choice in choices if choice[0] != submission.public_id and submission.state in WITH_RESULTS
            ),
            showcase=tuple(self._showcase(board, submission)),
            listed=may_see_episode(self._viewer, board, submission, showcase=False),
            private=is_private(submission),
        )

    def episode_list(self, slug: str, public_id: str, wanted: EpisodeFilter, page: int) -> EpisodeList:
        """A page of a submission's episodes: of all of them, or of the showcase where no more may be seen."""
        board, submission = self._submission(slug, public_id)
        only_showcase = None if may_see_episode(self._viewer, board, submission, showcase=False) else True
        environments = [wanted.environment] if wanted.environment else None
        success, outcome = _SUCCESS.get(wanted.verdict), _UNRESOLVED if wanted.verdict == "unknown" else None

        def count(success: bool | None, outcome: str | None, labels: list[str] | None) -> int:
            asked = Filter(environments=labels, showcase=only_showcase, success=success, outcome=outcome)
            return episodes.listing(self._store, submission, asked, limit=0)[1]

        matching = count(success, outcome, environments)
        pages = max(1, -(-matching // PAGE))
        page = min(max(page, 1), pages)
        asked = Filter(environments=environments, showcase=only_showcase, success=success, outcome=outcome)
        lines, _ = episodes.listing(self._store, submission, asked, offset=(page - 1) * PAGE, limit=PAGE)
        return EpisodeList(
            key="",
            title=submission.name,
            rows=tuple(episode_row(submission, line) for line in lines),
            filter=wanted,
            total=count(None, None, None),
            matching=matching,
            solved=0 if outcome or success is False else count(True, None, environments),
            failed=0 if outcome or success else count(False, None, environments),
            agents=(),
            environments=tuple(environment.label for environment in board.environments),
            page=page,
            pages=pages,
            notices=() if only_showcase is None else (_SEALED,),
            by_turns=False,
        )

    def episode(self, key: str) -> ShownEpisode:
        """The episode of a row's key, and what it belongs to."""
        public_id, _, number = key.partition(".")
        if not (number.isascii() and number.isdigit() and len(number) < 18):
            raise NotFound(f"there is no episode {key!r}")
        submission = submissions.find(self._store, public_id)
        board = boards.of_id(self._store, submission.board_id)
        played = episodes.read(self._store, submission, int(number))
        if not may_see_episode(self._viewer, board, submission, showcase=played.line.showcase):
            raise NotFound(f"submission {public_id} has no episode {number}")
        environment = board.environment(played.line.environment)
        row = episode_row(submission, played.line)
        view = evaluated_view(
            key,
            f"{environment.label}, {row.label}",
            played.trajectory.model_copy(update={"agent": submission.name}),
            played.record,
            environment=environment.definition.id,
            options_json=environment.options_json,
        )
        return ShownEpisode(board.slug, board.definition.title, public_id, submission.name, view)

    def beside(self, key: str) -> list[EpisodeRow]:
        """Other episodes of the same instance that may be seen: of this submission and of others."""
        shown = self.episode(key)
        board = boards.find(self._store, shown.board)
        own = submissions.find(self._store, shown.submission)
        line = episodes.read(self._store, own, int(key.partition(".")[2])).line
        asked = Filter(environments=[line.environment], draw=line.draw, showcase=line.showcase)
        found: list[EpisodeRow] = []
        for submission in self._visible(board):
            if may_see_episode(self._viewer, board, submission, showcase=line.showcase):
                lines, _ = episodes.listing(self._store, submission, asked, limit=_MOST_BESIDE)
                found += [episode_row(submission, each) for each in lines if each.id != line.id]
            if len(found) >= _MOST_BESIDE:
                break
        return found[:_MOST_BESIDE]

    def comparison(self, slug: str, one: str, other: str) -> ComparisonView:
        """Two submissions of a board on the instances that both have played."""
        if one == other:
            raise NotFound("a submission is compared with another one; choose two")
        board, first = self._submission(slug, one)
        _, second = self._submission(slug, other)
        visible = self._visible(board)
        results = self._results(board)
        told = results.get(first.id, {}), results.get(second.id, {})
        both_played = first.state in WITH_RESULTS and second.state in WITH_RESULTS
        outcomes = episodes.outcomes(self._store, board, {first.id, second.id}) if both_played else {}
        return ComparisonView(
            board=board.slug,
            board_title=board.definition.title,
            one=one,
            other=other,
            one_name=first.name,
            other_name=second.name,
            adjusted=self._ranked(board, visible, results).adjusted(one, other),
            environments=tuple(
                environment_comparison(
                    environment,
                    outcomes.get(first.id, {}).get(environment.label, Outcomes()),
                    outcomes.get(second.id, {}).get(environment.label, Outcomes()),
                    (told[0].get(environment.label), told[1].get(environment.label)),
                )
                for environment in board.environments
            ),
            showcase=tuple(_pairs(self._showcase(board, first), self._showcase(board, second))),
        )

    def _visible(self, board: Board) -> list[Submission]:
        every = submissions.of_board(self._store, board)
        return [each for each in every if may_see_listed(self._viewer, each)]

    def _submission(self, slug: str, public_id: str) -> tuple[Board, Submission]:
        board = boards.find(self._store, slug)
        submission = submissions.find(self._store, public_id)
        if submission.board_id != board.id or not may_see_submission(self._viewer, submission):
            raise NotFound(f"there is no submission {public_id!r}")
        return board, submission

    def _results(self, board: Board) -> dict[int, dict[str, Result]]:
        return {number: by_label(told) for number, told in episodes.results(self._store, board).items()}

    def _showcase(self, board: Board, submission: Submission) -> list[EpisodeRow]:
        if not may_see_episode(self._viewer, board, submission, showcase=True):
            return []
        lines, _ = episodes.listing(self._store, submission, Filter(showcase=True), limit=_MOST_SHOWCASE)
        return [episode_row(submission, line) for line in lines]

    def _ranked(
        self, board: Board, visible: Sequence[Submission], results: dict[int, dict[str, Result]]
    ) -> BoardRanking:
        """The ranking, computed once for as long as nothing that it depends on changes."""
        version = (
            tuple((each.id, each.state, each.visibility) for each in visible),
            max((told.computed for each in results.values() for told in each.values()), default=None),
        )
        with self._ranking:
            known = self._rankings.get(board.slug)
            if known is None or known[0] != version:
                known = version, rank_board(board, visible, results, episodes.outcomes(self._store, board))
                self._rankings[board.slug] = known
            return known[1]


def _pairs(one: Sequence[EpisodeRow], other: Sequence[EpisodeRow]) -> Iterator[tuple[EpisodeRow, EpisodeRow]]:
    """Episodes of the same instance."""
    by_instance = {row.instance: row for row in other}
    return ((row, by_instance[row.instance]) for row in one if row.instance in by_instance)
