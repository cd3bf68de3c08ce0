"""The diary of a run: its ledger, its metrics, and the files of JSON lines that hold them. Imports no torch."""
