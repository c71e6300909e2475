//! The tiny reference models of the engine's tests. The repository has them packed, one archive for each family:
//! FAMILY.tar.zst holds FAMILY, FAMILY.* and FAMILY-*. Tests unpack the archives beside themselves, and again when an
//! archive changes.
//!
//! For each family, the file `.unpacked/FAMILY` records what was unpacked. A file that is neither what was unpacked nor
//! what the archive holds is somebody's work and is never overwritten: it is an error.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{self, ErrorKind, Read};
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

/// A tiny model (a file or a folder) or its logits, by its path in the folder of golden files, which is unpacked first.
///
/// # Panics
/// If the archives cannot be unpacked, or none of them holds this.
#[track_caller]
pub fn golden(name: &str) -> PathBuf {
    let (folder, unpacked) = unpacked();
    let folders = |file: &str| Path::new(file).ancestors().any(|ancestor| ancestor == Path::new(name));
    assert!(
        unpacked.iter().any(|file| folders(file)),
        "no archive in {} holds {name}. If it is new, pack it: tools/golden pack FAMILY",
        folder.display()
    );
    folder.join(name)
}

/// All files of the tiny models and their logits, which are unpacked first.
///
/// # Panics
/// If the archives cannot be unpacked.
#[track_caller]
pub fn golden_files() -> impl Iterator<Item = PathBuf> {
    let (folder, unpacked) = unpacked();
    unpacked.iter().map(|file| folder.join(file))
}

/// The folder of the archives, and the files in it that were unpacked. Each process looks once.
#[track_caller]
fn unpacked() -> (&'static Path, &'static BTreeSet<String>) {
    static FOLDER: LazyLock<PathBuf> = LazyLock::new(|| {
        Path::new(env!("CARGO_MANIFEST_DIR")).with_file_name("engine").join("tests/data/golden")
    });
    static FILES: LazyLock<Result<BTreeSet<String>, String>> = LazyLock::new(|| unpack(&FOLDER));
    match &*FILES {
        Ok(files) => (&FOLDER, files),
        Err(why) => panic!("{why}"),
    }
}

/// Unpacks what is not unpacked yet, and returns the names of all files.
fn unpack(folder: &Path) -> Result<BTreeSet<String>, String> {
    let families = Family::all(folder)?;
    // Without the lock first: when everything is unpacked, the folder may be read-only.
    let mut records: Vec<_> = families.iter().map_while(Family::up_to_date).collect();
    if records.len() < families.len() {
        let _lock = lock(folder).map_err(|e| cannot_write(folder, &e))?;
        let families = Family::all(folder)?;
        let (done, failed): (Vec<_>, Vec<_>) = families.iter().map(Family::update).partition(Result::is_ok);
        let failed: Vec<String> = failed.into_iter().filter_map(Result::err).collect();
        if !failed.is_empty() {
            return Err(failed.join("\n"));
        }
        records = done.into_iter().flatten().collect();
    }
    Ok(records.into_iter().flat_map(|record| record.files.into_keys()).collect())
}

/// Keeps other processes from unpacking until it is dropped.
fn lock(folder: &Path) -> io::Result<fs::File> {
    let records = folder.join(RECORDS);
    fs::create_dir_all(&records)?;
    let file = fs::File::options().create(true).truncate(false).write(true).open(records.join(".lock"))?;
    file.lock()?;
    Ok(file)
}

/// The folder of the records, in the folder of the archives. Names of families do not begin with a dot, names of other
/// files in it do.
const RECORDS: &str = ".unpacked";

/// What archives are called after their family.
const ARCHIVE: &str = ".tar.zst";

/// A family, and the state of its files.
struct Family {
    folder: PathBuf,
    name: String,
    archive: Vec<u8>,
}

impl Family {
    /// The families that have an archive.
    fn all(folder: &Path) -> Result<Vec<Family>, String> {
        let text = |e: io::Error| format!("{}: {e}", folder.display());
        let mut families = Vec::new();
        for entry in fs::read_dir(folder).map_err(text)? {
            let entry = entry.map_err(text)?;
            if let Some(name) = entry.file_name().to_str().and_then(|name| name.strip_suffix(ARCHIVE)) {
                let archive = fs::read(entry.path()).map_err(text)?;
                families.push(Family { folder: folder.to_owned(), name: name.to_owned(), archive });
            }
        }
        Ok(families)
    }

    /// The record, if all files are as the archive has them.
    fn up_to_date(&self) -> Option<Record> {
        let record = self.record();
        let is_there = |(name, print): (&String, &String)| {
            let item = Item::read(&self.folder.join(name)).ok().flatten();
            item.is_some_and(|item| item.print() == *print)
        };
        (record.archive == print(&self.archive) && record.files.iter().all(is_there)).then_some(record)
    }

    /// Makes the files what the archive has. A test that is killed meanwhile leaves the old record.
    fn update(&self) -> Result<Record, String> {
        if let Some(record) = self.up_to_date() {
            return Ok(record);
        }
        let items = self.items().map_err(|why| {
            let archive = format!("{}{ARCHIVE}", self.folder.join(&self.name).display());
            format!("{archive} is damaged: {why}. Take it from the repository again: git restore {archive}")
        })?;
        self.replace(&self.record(), &items)?;
        let files = items.iter().map(|(name, item)| (name.clone(), item.print())).collect();
        let record = Record { archive: print(&self.archive), files };
        let path = self.record_path();
        self.write(&Item::File(record.to_text().into_bytes()), &path).map_err(|e| cannot_write(&path, &e))?;
        Ok(record)
    }

    /// Replaces the files of the old record by these, unless somebody has changed one of them.
    fn replace(&self, old: &Record, items: &BTreeMap<String, Item>) -> Result<(), String> {
        let names: BTreeSet<&String> = old.files.keys().chain(items.keys()).collect();
        let mut differing = Vec::new();
        for name in names {
            let path = self.folder.join(name);
            let there = Item::read(&path).map_err(|e| format!("{}: {e}", path.display()))?;
            if there.as_ref() == items.get(name) {
                continue;
            }
            if there.is_some_and(|item| old.files.get(name) != Some(&item.print())) {
                let (path, family) = (path.display(), &self.name);
                return Err(format!(
                    "{path} is not what {family}{ARCHIVE} holds. If you changed it, pack it: tools/golden pack {family}. \
                     Otherwise delete it, and it will be unpacked again"
                ));
            }
            differing.push((path, items.get(name)));
        }
        for (path, item) in differing {
            let replaced = match item {
                Some(item) => self.write(item, &path),
                None => remove(&path),
            };
            replaced.map_err(|e| cannot_write(&path, &e))?;
        }
        Ok(())
    }

    /// Writes a file whole or not at all.
    fn write(&self, item: &Item, path: &Path) -> io::Result<()> {
        let new = self.folder.join(RECORDS).join(".new");
        found(fs::remove_file(&new))?;
        match item {
            Item::File(bytes) => fs::write(&new, bytes)?,
            Item::Link(to) => link(to, &new)?,
        }
        fs::create_dir_all(path.parent().expect("a file is in a folder"))?;
        fs::rename(&new, path)
    }

    /// The files in the archive, by name.
    fn items(&self) -> Result<BTreeMap<String, Item>, String> {
        let tar = decompress(&self.archive)?;
        let mut items = BTreeMap::new();
        let text = |e: io::Error| e.to_string();
        for entry in tar::Archive::new(&*tar).entries().map_err(text)? {
            let mut entry = entry.map_err(text)?;
            let name = String::from_utf8(entry.path_bytes().into_owned()).map_err(|e| e.to_string())?;
            // Each file belongs to exactly one family, and none leaves the folder.
            if name.split(['.', '-', '/']).next() != Some(&self.name)
                || name.split('/').any(|part| part == "..")
            {
                return Err(format!("it holds {name}, which does not belong to the family {}", self.name));
            }
            let kind = entry.header().entry_type();
            let item = if kind.is_file() {
                let mut bytes = Vec::new();
                entry.read_to_end(&mut bytes).map_err(text)?;
                Item::File(bytes)
            } else if kind.is_symlink() {
                let to = entry.link_name_bytes().unwrap_or_default().into_owned();
                Item::Link(String::from_utf8(to).map_err(|e| e.to_string())?)
            } else if kind.is_dir() {
                continue;
            } else {
                return Err(format!("{name} is neither a file nor a folder nor a symbolic link"));
            };
            items.insert(name, item);
        }
        Ok(items)
    }

    fn record_path(&self) -> PathBuf {
        self.folder.join(RECORDS).join(&self.name)
    }

    /// What was unpacked last; nothing if there is no record.
    fn record(&self) -> Record {
        fs::read_to_string(self.record_path()).ok().as_deref().and_then(Record::parse).unwrap_or_default()
    }
}

/// What was unpacked: length and checksum of the archive, and of each file by name.
#[derive(Default)]
struct Record {
    archive: String,
    files: BTreeMap<String, String>,
}

impl Record {
    fn to_text(&self) -> String {
        let files: String = self.files.iter().map(|(name, print)| format!("{print}\t{name}\n")).collect();
        format!("{}\n{files}", self.archive)
    }

    fn parse(text: &str) -> Option<Record> {
        let (archive, files) = text.split_once('\n')?;
        let file =
            |line: &str| line.split_once('\t').map(|(print, name)| (name.to_owned(), print.to_owned()));
        Some(Record { archive: archive.to_owned(), files: files.lines().map(file).collect::<Option<_>>()? })
    }
}

/// A file, or a symbolic link.
#[derive(PartialEq, Eq)]
enum Item {
    File(Vec<u8>),
    Link(String),
}

impl Item {
    /// What is at this path.
    fn read(path: &Path) -> io::Result<Option<Item>> {
        let Some(metadata) = found(fs::symlink_metadata(path))? else { return Ok(None) };
        Ok(Some(if metadata.is_symlink() {
            Item::Link(fs::read_link(path)?.to_string_lossy().into_owned())
        } else {
            Item::File(fs::read(path)?)
        }))
    }

    /// What tells it from others, in the record.
    fn print(&self) -> String {
        match self {
            Item::File(bytes) => print(bytes),
            Item::Link(to) => format!("-> {to}"),
        }
    }
}

/// CRC-32 and length, as gzip writes them.
fn print(bytes: &[u8]) -> String {
    format!("{} {}", crc32fast::hash(bytes), bytes.len())
}

/// The content of a Zstandard file, if its checksum is right.
fn decompress(archive: &[u8]) -> Result<Vec<u8>, String> {
    let mut rest = archive;
    let mut decoder = ruzstd::decoding::StreamingDecoder::new(&mut rest).map_err(|e| e.to_string())?;
    let mut content = Vec::new();
    decoder.read_to_end(&mut content).map_err(|e| e.to_string())?;
    let decoder = decoder.into_frame_decoder();
    if decoder.get_checksum_from_data().is_none_or(|sum| Some(sum) != decoder.get_calculated_checksum()) {
        return Err("its checksum is wrong".into());
    }
    if rest.is_empty() { Ok(content) } else { Err(format!("{} bytes follow its end", rest.len())) }
}

/// `None` instead of the error that there is no such file.
fn found<T>(result: io::Result<T>) -> io::Result<Option<T>> {
    match result {
        Ok(it) => Ok(Some(it)),
        Err(e) if matches!(e.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => Ok(None),
        Err(e) => Err(e),
    }
}

/// Removes a file, and its folder if that is empty then.
fn remove(path: &Path) -> io::Result<()> {
    found(fs::remove_file(path))?;
    let _ = fs::remove_dir(path.parent().expect("a file is in a folder"));
    Ok(())
}

#[cfg(unix)]
fn link(to: &str, path: &Path) -> io::Result<()> {
    std::os::unix::fs::symlink(to, path)
}

#[cfg(windows)]
fn link(to: &str, path: &Path) -> io::Result<()> {
    std::os::windows::fs::symlink_file(to, path)
}

fn cannot_write(path: &Path, error: &io::Error) -> String {
    format!(
        "the tiny models of the tests cannot be unpacked: cannot write {}: {error}. Tests unpack these models in the \
         source tree. If it must be read-only, unpack them before that: tools/golden unpack",
        path.display()
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use ruzstd::encoding::{CompressionLevel, compress_to_vec};

    /// A folder with archives in it.
    struct Archives(tempfile::TempDir);

    impl Archives {
        fn new() -> Archives {
            let archives = Archives(tempfile::tempdir().unwrap());
            archives.pack(
                "tiny",
                &[("tiny/weights", "1 2 3"), ("tiny/words", "-> ../big-one/words"), ("tiny.x", "x")],
            );
            archives.pack("big", &[("big-one/words", "a b c")]);
            archives
        }

        fn path(&self, name: &str) -> PathBuf {
            self.0.path().join(name)
        }

        /// Writes an archive. Contents that begin with an arrow are links.
        fn pack(&self, family: &str, files: &[(&str, &str)]) {
            let mut tar = tar::Builder::new(Vec::new());
            for (name, content) in files {
                let mut header = tar::Header::new_gnu();
                header.as_old_mut().name[..name.len()].copy_from_slice(name.as_bytes());
                header.set_mode(0o644);
                if let Some(to) = content.strip_prefix("-> ") {
                    header.set_entry_type(tar::EntryType::Symlink);
                    header.set_link_name(to).unwrap();
                    header.set_size(0);
                } else {
                    header.set_size(content.len() as u64);
                }
                header.set_cksum();
                let content = if content.starts_with("-> ") { "" } else { content };
                tar.append(&header, content.as_bytes()).unwrap();
            }
            let tar = tar.into_inner().unwrap();
            fs::write(self.archive(family), compress_to_vec(&*tar, CompressionLevel::Fastest)).unwrap();
        }

        fn archive(&self, family: &str) -> PathBuf {
            self.path(&format!("{family}{ARCHIVE}"))
        }

        fn write(&self, name: &str, content: &str) {
            fs::write(self.path(name), content).unwrap();
        }

        #[track_caller]
        fn unpack(&self) -> Vec<String> {
            unpack(self.0.path()).unwrap().into_iter().collect()
        }

        #[track_caller]
        fn assert_holds(&self, files: &[(&str, &str)]) {
            for (name, content) in files {
                assert_eq!(fs::read_to_string(self.path(name)).unwrap(), *content, "{name}");
            }
        }

        #[track_caller]
        fn assert_fails(&self, words: &[&str]) {
            let why = unpack(self.0.path()).unwrap_err();
            assert!(words.iter().all(|word| why.contains(word)), "{why}");
        }
    }

    const WHOLE: [(&str, &str); 4] =
        [("big-one/words", "a b c"), ("tiny.x", "x"), ("tiny/weights", "1 2 3"), ("tiny/words", "a b c")];

    #[test]
    fn archives_are_unpacked_once() {
        let archives = Archives::new();
        assert_eq!(archives.unpack(), WHOLE.map(|(name, _)| name));
        archives.assert_holds(&WHOLE);
        // Whoever unpacks takes the lock, which makes this file.
        let lock = archives.path(RECORDS).join(".lock");
        fs::remove_file(&lock).unwrap();
        assert_eq!(archives.unpack(), WHOLE.map(|(name, _)| name));
        assert!(!lock.exists());
    }

    #[test]
    fn processes_may_unpack_at_the_same_time() {
        const PROCESSES: usize = 4;
        for _ in 0..20 {
            let (archives, start) = (Archives::new(), std::sync::Barrier::new(PROCESSES));
            std::thread::scope(|scope| {
                for _ in 0..PROCESSES {
                    scope.spawn(|| {
                        start.wait();
                        archives.unpack();
                        archives.assert_holds(&WHOLE);
                    });
                }
            });
        }
    }

    #[test]
    fn a_missing_file_is_unpacked_again() {
        let archives = Archives::new();
        for missing in ["tiny.x", "tiny/words", "big-one", ".unpacked/tiny", ".unpacked"] {
            archives.unpack();
            let path = archives.path(missing);
            if path.is_dir() {
                fs::remove_dir_all(&path).unwrap()
            } else {
                fs::remove_file(&path).unwrap()
            }
            archives.unpack();
            archives.assert_holds(&WHOLE);
        }
    }

    #[test]
    fn a_changed_archive_is_unpacked_again() {
        let archives = Archives::new();
        archives.unpack();
        let new = [("tiny/words", "d e f"), ("tiny-two/weights", "4 5 6")];
        archives.pack("tiny", &new);
        assert_eq!(archives.unpack(), ["big-one/words", "tiny-two/weights", "tiny/words"]);
        archives.assert_holds(&new);
        archives.assert_holds(&WHOLE[..1]);
        assert!(!archives.path("tiny.x").exists() && !archives.path("tiny/weights").exists());

        // Without its archive, a folder may be somebody's work.
        fs::remove_file(archives.archive("tiny")).unwrap();
        assert_eq!(archives.unpack(), ["big-one/words"]);
        archives.assert_holds(&new);
    }

    #[test]
    fn unpacking_that_was_interrupted_is_completed() {
        let archives = Archives::new();
        archives.unpack();
        archives.pack("tiny", &[("tiny/weights", "4 5 6"), ("tiny/words", "d e f")]);
        fs::remove_file(archives.path("tiny.x")).unwrap();
        archives.write("tiny/weights", "4 5 6");
        link("../big-one/words", &archives.path(".unpacked/.new")).unwrap();
        archives.unpack();
        archives.assert_holds(&[("tiny/weights", "4 5 6"), ("tiny/words", "d e f")]);
        assert_eq!(
            fs::read_to_string(archives.path("big-one/words")).unwrap(),
            "a b c",
            "the link was replaced"
        );
    }

    #[test]
    fn a_changed_file_is_an_error_until_it_is_packed() {
        let archives = Archives::new();
        archives.unpack();
        archives.write("tiny.x", "y");
        let words = ["tiny.x is not what tiny.tar.zst holds", "tools/golden pack tiny"];
        archives.assert_fails(&words);
        archives.pack("tiny", &[("tiny.x", "z"), ("tiny/weights", "4 5 6")]);
        archives.assert_fails(&words);
        fs::remove_dir_all(archives.path(RECORDS)).unwrap();
        archives.assert_fails(&words);
        archives.assert_holds(&[("tiny.x", "y"), ("tiny/weights", "1 2 3")]);

        fs::remove_file(archives.path("tiny/weights")).unwrap();
        archives.pack("tiny", &[("tiny.x", "y"), ("tiny/weights", "4 5 6")]);
        archives.unpack();
        archives.assert_holds(&[("tiny.x", "y"), ("tiny/weights", "4 5 6")]);
    }

    #[test]
    fn a_damaged_archive_is_an_error() {
        let archives = Archives::new();
        let path = archives.archive("big");
        let sound = fs::read(&path).unwrap();
        for end in 0..sound.len() {
            fs::write(&path, &sound[..end]).unwrap();
            archives.assert_fails(&["big.tar.zst is damaged", "git restore"]);
        }
        fs::write(&path, [&*sound, b"and more"].concat()).unwrap();
        archives.assert_fails(&["big.tar.zst is damaged", "8 bytes follow"]);
        assert!(!archives.path("big-one").exists());
        archives.assert_holds(&[("tiny.x", "x")]);
        let mut harmless = 0;
        for at in 0..sound.len() {
            let mut damaged = sound.clone();
            damaged[at] ^= 1;
            fs::write(&path, damaged).unwrap();
            match unpack(archives.0.path()) {
                Err(why) => assert!(why.contains("big.tar.zst is damaged"), "{why}"),
                // Some bits mean nothing.
                Ok(_) => {
                    archives.assert_holds(&WHOLE);
                    harmless += 1;
                }
            }
        }
        assert!(10 * harmless < sound.len(), "{harmless} of {} bytes", sound.len());
    }

    #[test]
    fn an_archive_holds_only_its_family() {
        let archives = Archives::new();
        for stranger in ["tinymoe.gguf", "ti", "/tiny", "../tiny", "tiny/../big", "tiny/.."] {
            archives.pack("tiny", &[("tiny.x", "x"), (stranger, "y")]);
            archives.assert_fails(&[
                "tiny.tar.zst is damaged",
                stranger,
                "does not belong to the family tiny",
            ]);
        }
        assert!(!archives.path("tiny.x").exists());
    }

    #[test]
    fn a_folder_that_cannot_be_written_to_is_an_error() {
        let archives = Archives::new();
        archives.write(RECORDS, "not a folder");
        archives.assert_fails(&["cannot write", "tools/golden unpack"]);
    }

    #[test]
    fn links_between_the_tiny_models_lead_to_files() {
        assert!(golden_files().all(|file| file.is_file()));
        assert!(golden("llama3/model.safetensors").is_symlink() && golden("llama3").is_dir());
        let unknown = std::panic::catch_unwind(|| golden("nothing.gguf")).unwrap_err();
        assert!(unknown.downcast_ref::<String>().unwrap().contains("tools/golden pack FAMILY"));
    }
}
