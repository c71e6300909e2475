//! Every kernel is translated to the languages of Metal and Vulkan, as wgpu does it. Needs no GPU.

use forebay_gpu::{Variants, kernel_texts};
use naga::back::{msl, spv};
use naga::valid::{Capabilities, ValidationFlags, Validator};

#[track_caller]
fn assert_all_are_translated(variants: Variants) {
    let mut validator = Validator::new(ValidationFlags::all(), Capabilities::all());
    let metal = msl::Options { lang_version: (2, 4), fake_missing_bindings: true, ..Default::default() };
    let vulkan = spv::Options { lang_version: (1, 3), fake_missing_bindings: true, ..Default::default() };
    let mut count = 0;
    for (what, text) in kernel_texts(variants) {
        let module = naga::front::wgsl::parse_str(&text)
            .unwrap_or_else(|error| panic!("{what}: {}", error.emit_to_string(&text)));
        let info = validator
            .validate(&module)
            .unwrap_or_else(|error| panic!("{what}: {}", error.emit_to_string(&text)));
        msl::write_string(&module, &info, &metal, &Default::default())
            .unwrap_or_else(|error| panic!("{what} for Metal: {error}"));
        spv::write_vec(&module, &info, &vulkan, None)
            .unwrap_or_else(|error| panic!("{what} for Vulkan: {error}"));
        count += 1;
    }
    assert!(count > 100, "{count}");
}

#[test]
fn the_best_kernels_are_translated_for_metal_and_vulkan() {
    assert_all_are_translated(Variants::ALL);
}

#[test]
fn plain_kernels_are_translated_for_metal_and_vulkan() {
    assert_all_are_translated(Variants::PLAIN);
}
