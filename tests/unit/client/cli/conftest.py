"""Credentials in environment variables, or none."""

import os

import pytest


def set_login(monkeypatch, auth_url):
    monkeypatch.setenv("ST_AUTH", auth_url)
    monkeypatch.setenv("ST_USER", "test:tester")
    monkeypatch.setenv("ST_KEY", "testing")


@pytest.fixture(autouse=True)
def _no_credentials(monkeypatch):
    for variable in os.environ:
        if variable.startswith(("ST_", "OS_")):
            monkeypatch.delenv(variable)


@pytest.fixture
def login(monkeypatch):
    """Credentials for a Swift that does not answer."""
    set_login(monkeypatch, "http://127.0.0.1:9/auth/v1.0")


@pytest.fixture
def swift(swift, monkeypatch):
    set_login(monkeypatch, swift.auth_url)
    return swift
