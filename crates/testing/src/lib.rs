//! Helpers for the tests of all crates: comparing numbers, unpacking the tiny models, and skipping tests that cannot run
//! here.

mod compare;
mod golden;
mod skip;

pub use compare::{assert_same_bits, relative_error, worst};
pub use golden::{golden, golden_files};
pub use skip::{Need, shared, skipped, vectors};

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::{Path, PathBuf};

    fn entries(folder: &Path) -> impl Iterator<Item = PathBuf> {
        fs::read_dir(folder).into_iter().flatten().map(|entry| entry.unwrap().path())
    }

    /// A file that its program does not name is not compiled, so its tests would silently not run.
    #[test]
    fn every_file_in_the_folder_of_a_test_program_is_a_module_of_it() {
        let crates = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let folders =
            entries(&crates).flat_map(|a_crate| entries(&a_crate.join("tests")).collect::<Vec<_>>());
        let mut programs = 0;
        for folder in folders {
            let Ok(main) = fs::read_to_string(folder.join("main.rs")) else { continue };
            programs += 1;
            for file in entries(&folder).filter(|file| file.extension().is_some_and(|end| end == "rs")) {
                let name = file.file_stem().unwrap().to_str().unwrap();
                let named = main.lines().any(|line| line == format!("mod {name};"));
                assert!(named || name == "main", "{} is not named in main.rs", file.display());
            }
        }
        assert!(programs >= 4, "{programs} test programs were found");
    }
}
