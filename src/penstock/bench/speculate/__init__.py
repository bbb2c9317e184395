"""`penstock bench speculate`: what guessing tokens ahead gains, and why.

The same requests run plain and with drafts, in turns on one loaded model. `prompts` reads them,
`planted` guesses as well as it is told to, `runs` measures, `expected` has the formulas, `floors`
what the ledger predicts, `figures` puts one workload's together, `result` shows all.
"""
