"""Acceptance, characterised: a grid of settings, measured for any number of arms on the same prompts and seeds.

Read in this order: ``records.py`` (what is measured and kept), ``measure.py`` (how), ``statistics.py`` (what is made of
it, with :mod:`mtp_train.acceptance_intervals`, ``entropy.py`` and ``comparison.py``), ``costs.py`` and ``advice.py``
(what a user decides on). What comes out is a ``StudyReport`` of :mod:`mtp_train.report.cells`.
"""
