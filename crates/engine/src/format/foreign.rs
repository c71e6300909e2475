//! Recognises files that people mistake for a model, and says what to do about them.

/// What to do about a file that ends too early.
pub(crate) const CUT_SHORT: &str = "perhaps the download was interrupted: download it again";

/// Describes a file that starts with `head`, and what to do.
pub(super) fn describe(head: &[u8]) -> String {
    match recognise(head) {
        Some(what) => format!("it looks like {what}"),
        None => {
            let magic: Vec<String> = head.iter().take(4).map(|b| format!("{b:02x}")).collect();
            let magic = magic.join(" ");
            format!("it starts with the bytes {magic}; name a GGUF file, or a folder with safetensors files")
        }
    }
}

/// Recognises what people mistake for a model; returns what the file is and what to do.
pub(crate) fn recognise(head: &[u8]) -> Option<&'static str> {
    const OLD_MAGICS: [&[u8]; 4] = [b"lmgg", b"fmgg", b"tjgg", b"algg"];
    const ARCHIVES: [&[u8]; 5] = [b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"7z\xbc\xaf", b"Rar!", b"\xfd7zXZ"];
    // The start of Python pickles, version 2 and later.
    const PICKLES: [&[u8]; 4] = [b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05"];

    let starts_with_any = |magics: &[&[u8]]| magics.iter().any(|magic| head.starts_with(magic));
    let text = head.trim_ascii_start();
    if head.starts_with(b"version https://git-lfs") {
        Some("a Git LFS pointer, not the file it points to; fetch it with `git lfs pull`")
    } else if [&b"<!doctype"[..], b"<html", b"<?xml"].iter().any(|tag| starts_with_ignoring_case(text, tag)) {
        Some("a web page, perhaps a server's error message instead of the file; download it again")
    } else if is_safetensors(head) {
        Some("a safetensors file; name it with the suffix .safetensors, beside its config.json")
    } else if starts_with_any(&OLD_MAGICS) {
        Some("a GGML file from before GGUF; convert the model again")
    } else if head.starts_with(b"PK\x03\x04") {
        Some("a zip archive or a PyTorch checkpoint; use the model's GGUF or safetensors files")
    } else if starts_with_any(&PICKLES) {
        Some("a PyTorch checkpoint or another Python pickle; use the model's GGUF or safetensors files")
    } else if starts_with_any(&ARCHIVES) {
        Some("a compressed archive; unpack it and name the file in it")
    } else if head.starts_with(b"%PDF-") {
        Some("a PDF document; name a GGUF file, or a folder with safetensors files")
    } else if !head.is_empty() && head.iter().all(|&b| b == 0) {
        Some(
            "an unfinished download, because it starts with zeros; wait until it is complete, or download it again",
        )
    } else {
        None
    }
}

/// A safetensors file starts with the length of its JSON header in eight bytes, followed by the header.
fn is_safetensors(head: &[u8]) -> bool {
    const MAX_JSON: u64 = 100_000_000;
    match head.split_first_chunk::<8>() {
        Some((len, json)) => json.starts_with(b"{") && u64::from_le_bytes(*len) <= MAX_JSON,
        None => false,
    }
}

fn starts_with_ignoring_case(text: &[u8], prefix: &[u8]) -> bool {
    text.get(..prefix.len()).is_some_and(|start| start.eq_ignore_ascii_case(prefix))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn common_mistakes_are_named() {
        let cases: [(&[u8], &str); 11] = [
            (b"version https://git-lfs.example/spec/v1\noid sha256:00", "Git LFS pointer"),
            (b"\n <!DOCTYPE html><html>", "web page"),
            (b"<html><body>404", "web page"),
            (b"\x40\0\0\0\0\0\0\0{\"__metadata__\":", "safetensors"),
            (b"tjgg\x03\0\0\0", "before GGUF"),
            (b"PK\x03\x04", "PyTorch"),
            (b"\x80\x02}q\0", "PyTorch"),
            (b"\x1f\x8b\x08\0", "unpack"),
            (b"%PDF-1.7", "PDF"),
            (b"<?xml version=\"1.0\"?><Error>", "web page"),
            (&[0; 64], "zeros"),
        ];
        for (head, expected) in cases {
            assert!(describe(head).contains(expected), "{}", describe(head));
        }
    }

    #[test]
    fn unknown_files_are_described_by_their_first_bytes() {
        assert!(
            describe(b"\x7fELF\x02").starts_with("it starts with the bytes 7f 45 4c 46; name a GGUF file")
        );
        assert!(describe(b"hi").starts_with("it starts with the bytes 68 69; "));
    }
}
