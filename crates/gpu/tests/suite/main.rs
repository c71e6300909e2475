//! The tests of GPUs through Metal and Vulkan. They need such a GPU; a program that computes on the processor in place of
//! one will do.

#[path = "../common/mod.rs"]
mod common;

mod bits;
mod counts;
mod scaled;
mod unified;

mod best {
    forebay_device_tests::device_suite!(crate::common::Best: kernels, operations, mixtures, golden, conversations, batches);

    #[test]
    fn matrices_with_a_scale_are_the_processors() {
        forebay_device_tests::run::<crate::common::Best>(
            crate::scaled::matrices_with_a_scale_are_the_processors::<crate::common::Best>,
        );
    }
}

mod plain {
    // Only kernels differ without features. Of whole models, each family's logits are enough.
    forebay_device_tests::device_suite!(crate::common::Plain: kernels, operations, mixtures);
    forebay_device_tests::tests! { run golden crate::common::Plain:
        exact_logits_of_the_tiny_models_equal_those_of_others
        logits_of_single_tokens_equal_those_of_others
    }

    #[test]
    fn matrices_with_a_scale_are_the_processors() {
        forebay_device_tests::run::<crate::common::Plain>(
            crate::scaled::matrices_with_a_scale_are_the_processors::<crate::common::Plain>,
        );
    }
}

mod card {
    forebay_device_tests::device_suite!(crate::common::Card: memory, tiers);
}
