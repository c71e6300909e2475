//! Chat templates for tests: our own, and published ones if they exist on this machine.

use std::path::Path;

use forebay_testing::shared;

pub struct Template {
    pub name: String,
    pub source: String,
}

/// A template that builds control tokens from roles, as several published ones do.
const ROLES: &str = "{{ bos_token }}{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + (m['content'] or '') }}\
                     {{ eos_token }}\n{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}";

/// The templates of tools/chat_templates and of ../shared, which may be absent.
pub fn templates() -> Vec<Template> {
    let ours = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tools/chat_templates");
    let mut all = vec![Template { name: "roles".into(), source: ROLES.into() }];
    for folder in [Some(ours), shared("templates")].into_iter().flatten() {
        let paths = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
        for path in paths.filter(|path| path.extension().is_some_and(|e| e == "jinja")) {
            let name = path.file_name().unwrap().to_string_lossy().into_owned();
            all.push(Template { name, source: std::fs::read_to_string(&path).unwrap() });
        }
    }
    all.sort_by(|a, b| a.name.cmp(&b.name));
    all
}
