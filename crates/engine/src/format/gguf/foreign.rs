//! Names what was found in place of a GGUF file, for the mistakes people make.

/// Says what a file that starts with `head` looks like.
pub(super) fn describe(head: &[u8]) -> String {
    match recognise(head) {
        Some(what) => format!("it looks like {what}"),
        None => {
            let magic: Vec<String> = head.iter().take(4).map(|b| format!("{b:02x}")).collect();
            format!("it starts with the bytes {}", magic.join(" "))
        }
    }
}

fn recognise(head: &[u8]) -> Option<&'static str> {
    const OLD_MAGICS: [&[u8]; 4] = [b"lmgg", b"fmgg", b"tjgg", b"algg"];

    let text = head.trim_ascii_start();
    if head.starts_with(b"version https://git-lfs") {
        Some("a Git LFS pointer, not the file it points to; fetch it with `git lfs pull`")
    } else if starts_with_ignoring_case(text, b"<!doctype") || starts_with_ignoring_case(text, b"<html") {
        Some("a web page, perhaps what a server answered instead of the file; download it again")
    } else if is_safetensors(head) {
        Some("a safetensors file")
    } else if OLD_MAGICS.iter().any(|magic| head.starts_with(magic)) {
        Some("a GGML file from before GGUF; convert the model again")
    } else if head.starts_with(b"PK\x03\x04") {
        Some("a zip archive or a PyTorch checkpoint")
    } else if head.iter().all(|&b| b == 0) {
        Some("a download that has not been written yet, for it starts with zeros")
    } else {
        None
    }
}

/// A safetensors file starts with the length of its JSON header, in eight bytes, and then that JSON.
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
        let cases: [(&[u8], &str); 7] = [
            (b"version https://git-lfs.example/spec/v1\noid sha256:00", "Git LFS pointer"),
            (b"\n <!DOCTYPE html><html>", "web page"),
            (b"<html><body>404", "web page"),
            (b"\x40\0\0\0\0\0\0\0{\"__metadata__\":", "safetensors"),
            (b"tjgg\x03\0\0\0", "before GGUF"),
            (b"PK\x03\x04", "PyTorch"),
            (&[0; 64], "zeros"),
        ];
        for (head, expected) in cases {
            assert!(describe(head).contains(expected), "{}", describe(head));
        }
    }

    #[test]
    fn anything_else_is_shown_by_its_first_bytes() {
        assert_eq!(describe(b"\x7fELF\x02"), "it starts with the bytes 7f 45 4c 46");
        assert_eq!(describe(b"hi"), "it starts with the bytes 68 69");
    }
}
