//! The tests of GPUs through Metal and Vulkan. They need such a GPU; a program that computes on the processor in place of
//! one will do.

#[path = "../common/mod.rs"]
mod common;

mod bits;
mod unified;

mod best {
    forebay_device_tests::device_suite!(crate::common::Best: kernels, operations, mixtures, golden, conversations, batches);
}

mod plain {
    forebay_device_tests::device_suite!(crate::common::Plain: kernels, operations, mixtures, golden, conversations, batches);
}
