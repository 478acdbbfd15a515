"""Places of uploads are shared fairly between accounts."""

import threading

import pytest

from hapi_protocol.errors import AnnotationError, HapiError
from hapi_worker.models.upload_places import UploadPlaces
from hapi_worker.peer import always_connected
from waiting import until


class Uploads:
    """Uploads in threads, in the order in which they came."""

    def __init__(self, num_places=2, max_waiting=8, wait_seconds=5.0):
        self.places = UploadPlaces(
            num_places, max_waiting=max_waiting, wait_seconds=wait_seconds
        )
        self.served: list[str] = []
        self.refused: list[HapiError] = []
        self._held: dict[str, threading.Event] = {}
        self._threads: dict[str, threading.Thread] = {}

    def begin(self, name, is_disconnected=always_connected):
        """Begins the upload of an account, the first letter of its name."""
        before = self._seen()
        self._held[name] = threading.Event()
        thread = threading.Thread(
            target=self._run, args=[name, is_disconnected]
        )
        self._threads[name] = thread
        thread.start()
        until(lambda: self._seen() > before)

    def _seen(self):
        seen = len(self.served) + len(self.refused)
        return seen + self.places.num_waiting()

    def _run(self, name, is_disconnected):
        try:
            with self.places.held(name[0], is_disconnected):
                self.served.append(name)
                assert self._held[name].wait(20)
        except HapiError as error:
            self.refused.append(error)

    def end(self, name, num_served):
        self._held[name].set()
        self._threads[name].join(20)  # the place is free
        until(lambda: len(self.served) == num_served)

    def join(self):
        for event in self._held.values():
            event.set()
        for thread in self._threads.values():
            thread.join(10)
            assert not thread.is_alive()


@pytest.fixture
def uploads():
    uploads = Uploads()
    yield uploads
    uploads.join()


def test_account_with_many_uploads_leaves_a_place_for_others(uploads):
    for name in ("a1", "a2", "a3", "b1"):
        uploads.begin(name)
    assert uploads.served == ["a1", "b1"]
    uploads.end("b1", 2)
    assert uploads.places.num_waiting() == 2
    uploads.end("a1", 3)
    assert uploads.served[2] == "a2"


def test_accounts_take_turns(uploads):
    for name in ("a1", "b1", "a2", "a3", "b2", "c1", "c2"):
        uploads.begin(name)
    for number, name in enumerate(("a1", "b1", "a2", "b2", "c1"), 3):
        uploads.end(name, number)
    assert uploads.served == ["a1", "b1", "a2", "b2", "c1", "a3", "c2"]


def test_account_with_the_most_waiting_uploads_is_turned_away():
    uploads = Uploads(num_places=1, max_waiting=2)
    for name in ("a1", "b1", "b2", "c1"):
        uploads.begin(name)
    until(lambda: uploads.refused)
    assert [error.code for error in uploads.refused] == ["queue_full"]
    uploads.end("a1", 2)
    uploads.end("b1", 3)
    assert uploads.served == ["a1", "b1", "c1"]
    uploads.join()


def test_wait_for_a_place_ends_in_time_or_with_its_caller():
    uploads = Uploads(num_places=1, wait_seconds=0.1)
    uploads.begin("a1")
    uploads.begin("b1", lambda: True)
    uploads.begin("c1")
    until(lambda: len(uploads.refused) == 2)
    gone, late = uploads.refused
    assert isinstance(gone, AnnotationError)
    assert (late.status, late.code) == (503, "queue_full")
    assert late.retry_after
    uploads.end("a1", 1)
    uploads.begin("d1")
    assert uploads.served == ["a1", "d1"]
    uploads.join()
