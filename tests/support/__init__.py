"""Fakes and processes that several groups of tests share; the package never imports them."""
