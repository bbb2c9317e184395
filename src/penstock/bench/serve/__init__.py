"""Load on a server with OpenAI's API, and what its users would have seen.

In the order of a run: `workload`, `traces` (what is asked), `arrivals` (when), `load` (asking),
`api` over `http_client` (one request), `record` (what came back), `figures` (what it comes to),
`result` and `page` (how it is shown).
"""
