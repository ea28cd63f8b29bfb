"""The crash points of the product, by whose they are."""

from __future__ import annotations

ISLAND = (
    "step stepped before_take taken ready go meeting connected averaged reached commit before_land mid_land landed have"
).split()
LEADER = "hosting evaluate save saving before_publish".split()
JOINER = "before_hello fetching fetched before_have have".split()
DONOR = "asked sending sent".split()
COORDINATOR = (
    "before_record_state recorded_state before_record_committed recorded_committed sent_go sent_meet sent_commit "
    "sent_lease"
).split()
COORDINATOR_AT_A_JOIN = "hello before_record_member recorded_member sent_welcome sent_donor sent_serve".split()
