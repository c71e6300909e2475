//! Unpacks the tiny reference models of the tests. `tools/golden` calls this.

fn main() {
    println!("{} files are unpacked", forebay_testing::golden_files().count());
}
