"""Opens a board's database, brings its tables up to date, and begins transactions in it.

SQLite (the default: DATA/board.sqlite, write-ahead log, every commit on the disk) or PostgreSQL. A transaction that
writes takes SQLite's only write lock when it begins, so it never fails half-way because another one wrote first.
"""

import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.util import CommandError
from sqlalchemy import URL, Connection, Engine, create_engine, event, make_url
from sqlalchemy.engine import ExceptionContext
from sqlalchemy.exc import ArgumentError, DBAPIError, IntegrityError
from sqlalchemy.orm import Session

from turngym_leaderboard.store.errors import StoreError

FILE: Final = "board.sqlite"
SUBMISSIONS: Final = "submissions"
"""Of a board's folder: its database and the folder of what is submitted."""
_MIGRATIONS: Final = Path(__file__).with_name("migrations")
_WAITS: Final = 30.0
"""Seconds that a writer waits for others before it gives up."""
_MIGRATION_LOCK: Final = 0x7475726E
"""Of PostgreSQL's advisory locks: only one process migrates."""
_WRITES: Final = "turngym_writes"


class Store:
    """A board's database and folder. Made by `open_store`; may be shared by threads, not by forked processes.

    Attributes:
        data: the folder; files of submissions lie in it.
        url: where the database is, without its password.
    """

    def __init__(self, data: Path, engine: Engine) -> None:
        self.data = data
        self.url = engine.url.render_as_string(hide_password=True)
        self._reading = engine
        self._writing = engine.execution_options(**{_WRITES: True})

    @contextmanager
    def reading(self) -> Generator[Session]:
        """A transaction that only reads; it sees one state of the database."""
        with Session(self._reading) as session, session.begin():
            yield session

    @contextmanager
    def writing(self) -> Generator[Session]:
        """A transaction that is committed at the end of the block, or undone by an exception in it."""
        with Session(self._writing) as session, session.begin():
            yield session

    def folder(self, public_id: str) -> Path:
        """Where a submission's files lie."""
        return self.data / SUBMISSIONS / public_id


@contextmanager
def open_store(data: Path, url: str = "") -> Generator[Store]:
    """Opens the database of a folder, makes both where there are none, and migrates an older database.

    Args:
        data: the board's folder; only its owner may read it if it is made here.
        url: a PostgreSQL database, as postgresql://user:password@host/name; "": SQLite in the folder.

    Raises:
        StoreError: it cannot be opened, or a newer turngym made it.
    """
    engine = _engine(data, url)
    try:
        try:
            _migrate(engine)
        except DBAPIError as error:
            raise StoreError(f"{_told(engine.url)} cannot be opened: {_first_line(error.orig or error)}") from error
        store = Store(data, engine)
        yield store
    finally:
        engine.dispose()


def _engine(data: Path, url: str) -> Engine:
    try:
        data.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not url:
            return _sqlite(data / FILE)
        parsed = make_url(url)
    except OSError as error:
        raise StoreError(f"{data} cannot be a board's folder: {error.strerror}") from error
    except ArgumentError as error:
        # Not the text that came: it may hold a password.
        raise StoreError("the database's URL cannot be read; expected postgresql://user:password@host/name") from error
    if parsed.get_backend_name() != "postgresql":
        raise StoreError(
            f"a database of kind {parsed.get_backend_name()!r}: expected postgresql://…, or none for SQLite"
        )
    try:
        engine = create_engine(parsed.set(drivername="postgresql+psycopg"), pool_pre_ping=True, hide_parameters=True)
    except ModuleNotFoundError as error:
        raise StoreError(f"PostgreSQL needs a driver: pip install 'turngym[postgresql]' ({error})") from error
    event.listen(engine, "handle_error", _without_rows)
    return engine


def _without_rows(context: ExceptionContext) -> IntegrityError | None:
    """PostgreSQL quotes the row that it refuses, whose parameters are hidden as anywhere."""
    told, original = context.sqlalchemy_exception, context.original_exception
    if not isinstance(told, IntegrityError):
        return None
    original.args = (_first_line(original),)
    return IntegrityError(told.statement, None, original, hide_parameters=True)


def _sqlite(file: Path) -> Engine:
    # The file holds secrets; its log and index get the same mode from SQLite.
    os.close(os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    # Parameters are hidden from errors, and so from logs: some are secrets, seeds and hashes of tokens.
    engine = create_engine(
        URL.create("sqlite+pysqlite", database=str(file)), connect_args={"timeout": _WAITS}, hide_parameters=True
    )
    event.listen(engine, "connect", _configure_sqlite)
    event.listen(engine, "begin", _begin_sqlite)
    return engine


def _configure_sqlite(connection: Any, record: object) -> None:
    # Python's driver would begin transactions by itself, and only before some statements.
    connection.isolation_level = None
    for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON"):
        connection.execute(f"PRAGMA {pragma}").close()


def _begin_sqlite(connection: Connection) -> None:
    writes = connection.get_execution_options().get(_WRITES, False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def _migrate(engine: Engine) -> None:
    config = Config()
    config.set_main_option("script_location", str(_MIGRATIONS).replace("%", "%%"))
    scripts = ScriptDirectory.from_config(config)
    with engine.begin() as connection:
        if MigrationContext.configure(connection).get_current_heads() == tuple(scripts.get_heads()):
            return
    with engine.execution_options(**{_WRITES: True}).begin() as connection:
        if connection.dialect.name == "postgresql":
            connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({_MIGRATION_LOCK})")
        config.attributes["connection"] = connection
        try:
            command.upgrade(config, "head")
        except CommandError as error:
            raise StoreError(f"{_told(engine.url)} was made by a newer turngym: {error}") from error


def _told(url: URL) -> str:
    return url.database or "" if url.get_backend_name() == "sqlite" else url.render_as_string(hide_password=True)


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]
