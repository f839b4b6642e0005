"""Where each error code is met as its reader meets it: through the hooks, the command line, or real sockets.

``test_public_faces`` holds the table against the codes that there are.  A code that nobody outside can meet stands
in ``UNMET``, with the reason.
"""

from __future__ import annotations

_BAD_INPUT = "tests/integration/test_bad_input.py::"
_DEATHS = "tests/integration/test_deaths.py::"
_DECLARED = "tests/hooks/test_declared_faces.py::test_what_cannot_be_described"
_FACES = "tests/integration/test_error_faces.py::"
_FD = "tests/integration/test_fd_channel.py::"
_HOSTILE = "tests/integration/test_foreign_layouts.py::test_a_hostile_layout_is_refused_by_name"
_LIVE = "tests/hooks/test_live_memory.py::"
_MEET = "tests/hooks/test_hooks_meet.py::"
_ORDERS = "tests/hooks/test_foreign_orders.py::"
_PLANS = "tests/hooks/test_foreign_plans.py::"
_PLAN_FILES = "tests/unit/daemon/cli/test_plan_layouts.py::"
_PLAN_LAYOUTS = "tests/unit/daemon/cli/test_plan_refusals.py::test_layouts_that_do_not_cover"
_PLAN_ROSTERS = "tests/unit/daemon/cli/test_plan_refusals.py::test_a_roster_that_cannot_stand"
_PEFT = "tests/hooks/test_peft_ranks.py::"
_RARE = "tests/integration/test_rare_faces.py::"
_TRACED = "tests/hooks/test_traced_refusals.py::"

MET: dict[str, str] = {
    "E_ADMISSION": "tests/integration/test_foreign_hooks.py::"
    "test_another_process_is_not_welcomed_as_a_rank_that_is_here",
    "E_APPLY": _FACES + "test_an_engine_rank_that_refuses_to_pause",
    "E_APPLY_ENDED": _ORDERS + "test_a_version_that_is_taken_back_without_a_reason",
    "E_BUDGET": _FACES + "test_a_bucket_smaller_than_an_element",
    "E_CONFIG": _FACES + "test_an_engine_rank_that_refuses_to_pause",
    "E_DEADLINE": _FACES + "test_a_version_that_one_rank_never_publishes",
    "E_DECLARATION": _DECLARED,
    "E_DESCRIPTION": _PLAN_LAYOUTS,
    "E_DIGEST": _FACES + "test_bytes_that_change_between_nodes",
    "E_ELEM_AMBIGUOUS": _PLAN_LAYOUTS,
    "E_ELEM_UNCOVERED": _BAD_INPUT + "test_trainer_and_engine_disagree",
    "E_GPU_MISMATCH": _RARE + "test_ranks_in_other_places_than_their_roster_file_says",
    "E_HOLDINGS": _ORDERS + "test_a_parameter_that_grew_since_it_was_attached",
    "E_HOOK_DEADLINE": _FD + "test_a_silent_daemon_meets_the_deadline",
    "E_JOURNAL": _FACES + "test_a_journal_without_room",
    "E_JOURNAL_FILE": _FACES + "test_a_damaged_journal_is_said_to_who_attaches",
    "E_LAYOUT_BOX": _HOSTILE,
    "E_LAYOUT_BUFFER": _HOSTILE,
    "E_LAYOUT_COLUMNS": _HOSTILE,
    "E_LAYOUT_CONFLICT": _HOSTILE,
    "E_LAYOUT_CUT": _DECLARED,
    "E_LAYOUT_DTYPE": _HOSTILE,
    "E_LAYOUT_ENTRY": _HOSTILE,
    "E_LAYOUT_FILES": _PLAN_FILES + "test_missing_and_foreign_files_are_all_named",
    "E_LAYOUT_FILE_RANK": _PLAN_FILES + "test_missing_and_foreign_files_are_all_named",
    "E_LAYOUT_FILE_READ": "tests/unit/daemon/cli/test_plan_refusals.py::test_a_layout_file_that_cannot_be_read",
    "E_LAYOUT_MESSAGE": "tests/integration/test_foreign_layouts.py::test_a_layout_whose_content_is_another",
    "E_LAYOUT_NAME": _HOSTILE,
    "E_LAYOUT_OPERATION": _PLAN_FILES + "test_pieces_too_many_to_meet",
    "E_LAYOUT_SKEW": _RARE + "test_a_version_of_another_layout_than_was_planned",
    "E_LIVE": _LIVE + "test_a_parameter_that_cannot_move_refuses_before_any_daemon_is_asked",
    "E_LIVE_READ": _LIVE + "test_a_step_under_a_reader_is_refused_and_may_be_tried_again",
    "E_LIVE_WRITTEN": _LIVE + "test_what_is_written_while_it_is_published_is_named_at_the_next_call",
    "E_MEMORY": "tests/integration/test_foreign_layouts.py::test_a_layout_larger_than_the_memory_that_was_announced",
    "E_MEMORY_BUDGET": _FACES + "test_a_landing_larger_than_its_budget",
    "E_MEMORY_EXHAUSTED": _FACES + "test_slots_that_no_host_has_memory_for",
    "E_MIXED": _BAD_INPUT + "test_an_engine_on_a_trainers_slot",
    "E_MORE": _RARE + "test_more_violations_than_a_message_carries",
    "E_NAME": _BAD_INPUT + "test_a_tensor_that_no_engine_takes",
    "E_NAMES": _DECLARED,
    "E_NEW_TERM": _RARE + "test_bytes_of_a_leader_that_is_no_more",
    "E_NODE_MISMATCH": _RARE + "test_ranks_in_other_places_than_their_roster_file_says",
    "E_NODE_TILING": _PLAN_ROSTERS,
    "E_NOT_ATTACHED": _MEET + "test_absent_daemon_is_named_with_its_path",
    "E_NOT_RECEIVING": "tests/hooks/test_foreign_orders.py::test_nothing_is_received_before_attaching",
    "E_NOT_SERVABLE": "tests/integration/test_mid_copy.py::test_half_a_version_is_served_by_nobody",
    "E_NO_DAEMON": _BAD_INPUT + "test_no_daemon",
    "E_NO_LEADER": _FACES + "test_an_engine_whose_run_nobody_leads",
    "E_OUTCOME": _MEET + "test_outcome_that_nobody_told_is_not_taken_for_success",
    "E_OUT_OF_WORLD": _PLAN_ROSTERS,
    "E_OVERLAP": _PLAN_ROSTERS,
    "E_PAUSED": _DEATHS + "test_a_trainer_rank_that_died_comes_back",
    "E_PEER_GONE": _DEATHS + "test_the_daemon_of_an_engine_rank_dies_before_all_have_published",
    "E_PEER_LOST": _FACES + "test_streams_that_end_early_for_as_long_as_a_fetch_may_take",
    "E_PEER_UNKNOWN": _RARE + "test_a_node_that_does_not_know_whom_to_fetch_from",
    "E_PIECES": _DECLARED,
    "E_PLACEMENT": _DECLARED,
    "E_PLAN_BOUNDS": _PLANS + "test_a_row_that_leaves_its_memory",
    "E_PLAN_DIGEST": "tests/integration/test_foreign_peer.py::test_a_node_that_plans_something_else",
    "E_PLAN_MESSAGE": _PLANS + "test_bytes_that_are_no_plan",
    "E_PLAN_MISMATCH": _PLANS + "test_a_plan_that_leaves_out_parameters",
    "E_POISONED": "tests/integration/test_mid_copy.py::test_half_a_version_is_served_by_nobody",
    "E_PROTOCOL": "tests/integration/test_control_sockets.py::"
    "test_what_is_no_message_is_counted_and_the_next_one_is_heard",
    "E_PROTOCOL_LOCAL": _ORDERS + "test_a_label_that_no_message_carries",
    "E_PROTOCOL_VERSION": _FD + "test_another_protocol_is_denied_with_both_numbers",
    "E_RANK_DUP": _BAD_INPUT + "test_duplicate_trainer_rank",
    "E_RANK_LOST": _DEATHS + "test_a_trainer_rank_dies_before_it_published",
    "E_RANK_MISSING": _BAD_INPUT + "test_wrong_world",
    "E_RANK_PLAN": _ORDERS + "test_an_order_to_write_that_names_no_source",
    "E_RANK_UNKNOWN": _BAD_INPUT + "test_unknown_engine",
    "E_RECEIVE": _DEATHS + "test_the_leading_daemon_dies",
    "E_REFUSED": _BAD_INPUT + "test_trainer_and_engine_disagree",
    "E_RELAID": _TRACED + "test_what_is_refused_of_a_trace",
    "E_REMAINDER": _PLAN_ROSTERS,
    "E_REMOTE": _ORDERS + "test_an_error_of_a_later_release_keeps_its_text",
    "E_ROSTER": _PLAN_ROSTERS,
    "E_ROSTER_FILE": "tests/unit/daemon/cli/test_plan.py::test_unreadable_file_leaves_with_2",
    "E_RULES": "tests/unit/trainer_hooks/test_megatron.py::test_rules_that_do_not_fit",
    "E_SHAPE": _PLAN_ROSTERS,
    "E_SLOT": _MEET + "test_slot_that_does_not_become_free",
    "E_SOURCE": _MEET + "test_source_that_changes_while_it_is_read_is_torn",
    "E_SRC_UNUSED": _PLAN_LAYOUTS,
    "E_STALE_SOURCE": _FACES + "test_a_slot_that_is_written_after_it_was_published",
    "E_STEP": "tests/hooks/test_deepspeed_describe.py::test_nothing_is_published_in_the_middle_of_a_step",
    "E_TARGET": _DECLARED,
    "E_TARGET_MOVED": "tests/hooks/test_moved_parameters.py::test_re_bound_parameter_refuses_the_pause",
    "E_TARGET_OVERLAP": _PLAN_LAYOUTS,
    "E_TICKET": _RARE + "test_a_ticket_that_nobody_gave",
    "E_TRANSFER_DEADLINE": _FACES + "test_a_stream_that_says_no_more",
    "E_TRACE": _TRACED + "test_refusal_names_operation_parameter_and_line",
    "E_TRACE_TWICE": _TRACED + "test_refusal_names_operation_parameter_and_line",
    "E_TRACE_UNCOVERED": _TRACED + "test_what_is_refused_of_a_trace",
    "E_UNCOVERED": _PLAN_ROSTERS,
    "E_UNDECIDED": _FACES + "test_a_paused_rank_whose_leader_is_gone",
    "E_UNKNOWN_KEY": "tests/unit/daemon/cli/test_plan.py::test_unknown_key_leaves_with_2_and_names_it",
    "E_VERSION": _BAD_INPUT + "test_a_version_that_does_not_grow",
    "E_VERSION_SKEW": _BAD_INPUT + "test_ranks_that_publish_different_versions",
    "E_WAIT": _MEET + "test_wait_ends_by_its_limit_by_pause_and_by_release",
    "E_WORLD": _DECLARED,
    "E_EXCHANGE": _PEFT + "test_rank_that_is_late_ends_the_exchange_within_its_limit",
    "E_FROZEN": _PEFT + "test_frozen_shards_are_copied_once_and_watched",
    "E_LORA": _PEFT + "test_ranks_that_use_different_adapters_all_refuse",
    "E_LORA_CHOICE": "tests/unit/trainer_hooks/test_lora.py::"
    "test_peft_model_is_refused_where_nobody_says_what_is_published",
    "E_NOTHING": "tests/cases/test_field_reports_trainer.py::test_o44_publish_that_binds_nothing_is_an_error",
    "E_REPLICAS": _PEFT + "test_replicas_that_disagree_are_refused_on_every_rank",
    "E_TIE": _PEFT + "test_tie_that_sharding_breaks_is_never_picked_from",
}
"""Code to the test that meets it."""

UNMET: dict[str, str] = {
    "E_ELEMENT": "base; only subclasses are raised",
    "E_LAYOUT": "base; only subclasses are raised",
    "E_PLAN": "base; only subclasses are raised",
    "E_INTERNAL": "a fault of ours: a test that met it from outside would have found one to mend",
    "E_OUTSIDE_BUFFER": "every layout from outside is decoded first, and refused there as E_LAYOUT_BUFFER; the proof "
    "looks again because nothing may be planned past a buffer",
    "E_TRANSFER_CANCELLED": "a fetch is told to stop once its version has failed, and the version's own report is what "
    "ranks hear; tests/contract/test_bulk.py meets it on real sockets",
}
"""Code to the reason why nobody outside meets it."""
