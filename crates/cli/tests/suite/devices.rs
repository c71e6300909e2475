//! `--device`: which GPU is chosen, and what is said where there is none.

use forebay_testing::{Need, skipped};

use crate::common::{call, demo_model, forebay};

/// Whether the program that is tested uses Metal or Vulkan.
const IS_PORTABLE: bool = cfg!(any(feature = "gpu", target_vendor = "apple"));

fn failure(device: &str) -> String {
    call(&["run", &demo_model(), "--device", device, "-p", "a", "-n", "1"]).failure(1)
}

#[test]
fn a_build_without_them_says_how_to_get_metal_and_vulkan() {
    if IS_PORTABLE {
        return;
    }
    for device in ["metal", "vulkan:0"] {
        let error = failure(device);
        assert!(
            error.starts_with(&format!("{device} cannot be used")) && error.contains("--features gpu"),
            "{error}"
        );
    }
}

#[test]
fn the_interface_of_another_system_is_refused() {
    if IS_PORTABLE {
        let other = if cfg!(target_vendor = "apple") { "vulkan:0" } else { "metal" };
        let error = failure(other);
        assert!(error.starts_with("GPUs of this system are used through"), "{error}");
    }
}

/// Whether Vulkan finds anything to compute on.
fn is_there() -> bool {
    let found = IS_PORTABLE.then(|| call(&["doctor", "--quick", "--json"]).stdout);
    let found = found.and_then(|report| serde_json::from_str::<serde_json::Value>(&report).ok());
    let there = found.is_some_and(|report| report["gpu"]["portable"].is_array());
    if IS_PORTABLE && !there {
        skipped(Need::PortableGpu, "there is no GPU that Vulkan can use");
    }
    there
}

#[test]
fn a_gpu_that_does_not_exist_is_named() {
    if is_there() && !cfg!(target_vendor = "apple") {
        let error = failure("vulkan:99");
        assert!(error.starts_with("there is no GPU vulkan:99; the last one is vulkan:"), "{error}");
    }
}

#[test]
fn the_settings_file_chooses_a_device() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::create_dir(folder.path().join("forebay")).unwrap();
    std::fs::write(folder.path().join("forebay/config.toml"), "device = \"metal\"\n").unwrap();
    let mut command = forebay(["run", &demo_model(), "-p", "a", "-n", "1"]);
    let output = command.env("XDG_CONFIG_HOME", folder.path()).output().unwrap();
    let error = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.success(), cfg!(target_vendor = "apple"), "{error}");
}

#[test]
fn a_report_lists_the_machine_and_the_results_of_the_suite() {
    let folder = tempfile::tempdir().unwrap();
    let suite = folder.path().join("suite.txt");
    std::fs::write(&suite, "test best::one ... ok\ntest best::two ... FAILED\n").unwrap();
    let args = ["doctor", "--quick", "--report", "--suite", suite.to_str().unwrap()];
    let output = forebay(args).current_dir(folder.path()).output().unwrap();
    let report = String::from_utf8(output.stdout).unwrap();
    for expected in ["### Forebay ", "| system | ", "| CPU | ", "1 passed, 1 failed", "- failed: `best::two`"]
    {
        assert!(report.contains(expected), "no {expected:?} in:\n{report}");
    }
    std::fs::write(&suite, "nothing").unwrap();
    let output = forebay(args).current_dir(folder.path()).output().unwrap();
    assert!(String::from_utf8(output.stderr).unwrap().contains("has no results of tests"));
}
