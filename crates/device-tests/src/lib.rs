//! One suite of tests for every device: logits, conversations, batches, memory, experts in tiers, failures.
//!
//! A crate with a device implements [`TestDevice`] in its tests, [`CountingDevice`] and [`FaultyDevice`] as far as the
//! device allows, and lists the parts of the suite that apply:
//!
//! ```text
//! forebay_device_tests::device_suite!(crate::common::Gpu: golden, conversations, batches, memory, tiers);
//! ```
//!
//! Each part is a module of tests. The suite reaches devices only through the engine, so it tests what every user of a
//! device relies on. Failures affect the whole process, so `faults` and `tier_faults` need a separate test program.

// A test's name says what it tests.
#![allow(missing_docs)]

pub mod batches;
pub mod conversations;
mod device;
pub mod faults;
pub mod golden;
pub mod kernels;
pub mod memory;
pub mod mixtures;
pub mod operations;
mod rooms;
pub mod tier_faults;
pub mod tiers;

// Models that are shared with the engine's tests.
#[allow(dead_code)]
#[path = "../../engine/tests/common/gguf_builder.rs"]
mod gguf_builder;
#[path = "../../engine/tests/common/models.rs"]
pub mod models;
#[allow(dead_code)]
#[path = "../../engine/tests/common/tiny_model.rs"]
mod tiny_model;

pub use device::{CountingDevice, Fault, Faults, FaultyDevice, TestDevice, Use, run, run_failing};

/// The tests of some parts of the suite for one device, which is named by its full path.
#[macro_export]
macro_rules! device_suite {
    ($device:path: $($part:ident),+) => { $($crate::$part!($device);)+ };
}

/// Kernels for every type of weights, for routers and for choosing tokens, compared with the CPU. For a [`TestDevice`].
#[macro_export]
macro_rules! kernels {
    ($device:path) => {
        $crate::tests! { run kernels $device:
            floats_are_unpacked_and_multiplied
            plain_types_are_unpacked_and_multiplied
            k_types_are_unpacked_and_multiplied
            iq_types_are_unpacked_and_multiplied
            types_in_planes_are_unpacked_and_multiplied
            every_type_that_is_computed_is_tested
            large_activations_are_multiplied_too
            products_of_a_tall_matrix_are_those_of_its_weights
            a_sum_is_normed_and_multiplied
            routers_choose_what_the_processor_chooses
            the_likeliest_tokens_are_those_that_the_processor_finds
        }
    };
}

/// Operations, each alone and in unusual orders, compared with the CPU. For a [`TestDevice`].
#[macro_export]
macro_rules! operations {
    ($device:path) => {
        $crate::tests! { run operations $device:
            operations_on_rows_are_the_processors
            products_of_heads_are_the_processors
            what_is_written_is_used_from_then_on
            every_order_of_sums_norms_and_products_is_computed
            convolutions_go_on_where_they_ended
            attention_of_every_shape_is_the_processors
            attention_to_latents_is_the_processors
            attention_over_many_positions_is_the_processors
            the_delta_rule_is_the_processors
        }
    };
}

/// Mixtures of experts with every activation and router, compared with the CPU. For a [`TestDevice`].
#[macro_export]
macro_rules! mixtures {
    ($device:path) => {
        $crate::tests! { run mixtures $device:
            every_activation_is_computed_by_every_kernel
            routers_may_read_something_else_or_have_read_it_before
            adjugate_experts_add_to_each_expert_of_their_group
        }
    };
}

/// Logits, compared with other programs and with the CPU. For a [`TestDevice`].
#[macro_export]
macro_rules! golden {
    ($device:path) => {
        $crate::tests! { run golden $device:
            exact_logits_of_the_tiny_models_equal_those_of_others
            logits_of_quantised_folders_equal_those_of_others
            logits_of_the_tiny_models_are_close_by_default
            logits_of_single_tokens_equal_those_of_others
            logits_of_the_demo_model_equal_those_of_transformers
            logits_of_trained_models_equal_the_processors
            greedy_text_is_the_processors_until_two_tokens_are_as_likely
            linear_attention_in_chunks_is_the_recurrence
            too_little_memory_is_an_error
        }
    };
}

/// Conversations: computed together, forked, saved, loaded, and rewound. For a [`TestDevice`].
#[macro_export]
macro_rules! conversations {
    ($device:path) => {
        $crate::tests! { run conversations $device:
            conversations_go_on_together
            snapshots_move_between_devices
            conversations_are_saved_and_loaded_while_others_compute
            a_conversation_goes_back
            stages_change_no_bit
        }
    };
}

/// Batches of every size, and long conversations, compared with the CPU. For a [`TestDevice`].
#[macro_export]
macro_rules! batches {
    ($device:path) => {
        $crate::tests! { run batches $device:
            batches_of_every_size_and_type_are_what_each_conversation_is_alone
            gate_and_up_may_be_of_floats_and_not
            steps_of_long_conversations_see_what_they_should
        }
    };
}

/// The device's memory: planned, allowed and used. For a [`CountingDevice`].
#[macro_export]
macro_rules! memory {
    ($device:path) => {
        $crate::tests! { run memory $device:
            the_plan_is_kept
            a_budget_is_no_more_than_is_free
        }
    };
}

/// Experts in device memory, in RAM and on the drive. For a [`CountingDevice`] with expert slots.
#[macro_export]
macro_rules! tiers {
    ($device:path) => {
        $crate::tests! { run tiers $device:
            residency_changes_no_bit
            residency_changes_no_bit_of_any_family
            what_is_sent_ahead_changes_no_bit
            the_processor_computes_experts_beside_the_device
            a_warm_start_fills_both_tiers_with_different_experts
            slots_are_lent_to_conversations
            a_step_that_is_given_up_leaves_experts_on_the_device
            any_thread_may_compute
            grammars_take_no_memory_of_the_device
            slots_that_cannot_be_pinned_are_copied_from
        }
    };
}

/// Calls that fail, and a device that is lost. For a [`FaultyDevice`].
#[macro_export]
macro_rules! faults {
    ($device:path) => {
        $crate::tests! { run_failing faults $device:
            memory_that_is_not_there_is_an_error
            a_copy_that_fails_is_an_error
            a_start_that_fails_is_an_error
            a_lost_device_is_an_error_and_the_processor_goes_on
            the_budget_holds
        }
    };
}

/// Failures while experts are being uploaded. For a [`FaultyDevice`] with expert slots.
#[macro_export]
macro_rules! tier_faults {
    ($device:path) => {
        $crate::tests! { run_failing tier_faults $device:
            what_fails_on_its_way_is_brought_again
            a_lost_device_ends_the_answer_and_the_processor_goes_on
            fewer_slots_than_planned_are_enough
            both_budgets_hold
            a_drive_that_fails_ends_the_answer_and_not_the_engine
        }
    };
}

/// A module of tests that call the functions of the suite's module of the same name.
#[doc(hidden)]
#[macro_export]
macro_rules! tests {
    ($run:ident $part:ident $device:path: $($name:ident)+) => {
        mod $part {
            $(
                #[test]
                fn $name() {
                    $crate::$run::<$device>($crate::$part::$name::<$device>);
                }
            )+
        }
    };
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    /// A test that no list above names would never run.
    #[test]
    fn every_test_of_a_part_is_in_its_list() {
        let lists = include_str!("lib.rs");
        for part in [
            "kernels",
            "operations",
            "mixtures",
            "golden",
            "conversations",
            "batches",
            "memory",
            "tiers",
            "faults",
            "tier_faults",
        ] {
            let file = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("src/{part}.rs"));
            let file = fs::read_to_string(file).unwrap();
            let mut tests: Vec<&str> = file
                .lines()
                .filter_map(|line| line.strip_prefix("pub fn ")?.split_once("<D: "))
                .map(|(name, _)| name)
                .collect();
            let list = lists.split_once(&format!(" {part} $device:\n")).unwrap().1.split_once('}').unwrap().0;
            let mut listed: Vec<&str> = list.split_whitespace().collect();
            tests.sort_unstable();
            listed.sort_unstable();
            assert_eq!(tests, listed, "{part}");
        }
    }
}
