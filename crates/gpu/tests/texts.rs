//! Every kernel is translated to the languages of Metal and Vulkan, as wgpu does it. Needs no GPU.

use std::fs;
use std::path::Path;

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

/// A file that no text has would never be translated.
#[test]
fn every_file_is_in_some_text() {
    let mut texts: Vec<String> = Vec::new();
    for variants in [Variants::ALL, Variants::PLAIN] {
        texts.extend(kernel_texts(variants).map(|(_, text)| text));
    }
    let shaders = Path::new(env!("CARGO_MANIFEST_DIR")).join("shaders");
    let mut checked = 0;
    for folder in [shaders.clone(), shaders.join("unpack")] {
        for file in fs::read_dir(folder).unwrap().map(|file| file.unwrap().path()) {
            if file.is_dir() {
                continue;
            }
            let text = fs::read_to_string(&file).unwrap();
            let own = |line: &&str| {
                line.starts_with("// ") && !line.contains(['$', '#']) && !line.contains("PLANE")
            };
            let Some(line) = text.lines().find(own) else { continue };
            assert!(texts.iter().any(|text| text.contains(line)), "{}: {line}", file.display());
            checked += 1;
        }
    }
    assert!(checked > 50, "{checked}");
}
