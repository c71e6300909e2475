//! Reads a model's folder, so that tests can change it and write it again.

use std::path::{Path, PathBuf};

use safetensors::SafeTensors;
use serde_json::{Map, Value, json};

/// A tensor and its bytes.
#[derive(Clone, Debug)]
pub struct Tensor {
    pub name: String,
    pub dtype: String,
    pub shape: Vec<usize>,
    pub data: Vec<u8>,
}

/// A model's folder in memory.
#[derive(Clone, Debug)]
pub struct Folder {
    pub config: Map<String, Value>,
    pub tensors: Vec<Tensor>,
    /// The folder from which the tokenizer's files are copied.
    from: PathBuf,
}

impl Folder {
    /// Reads the folder at `path`, whose weights are in one file.
    pub fn read(path: &Path) -> Folder {
        let config = serde_json::from_slice(&std::fs::read(path.join("config.json")).unwrap()).unwrap();
        let bytes = std::fs::read(path.join("model.safetensors")).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let mut tensors: Vec<Tensor> = file
            .tensors()
            .into_iter()
            .map(|(name, view)| Tensor {
                name,
                dtype: view.dtype().to_string(),
                shape: view.shape().to_vec(),
                data: view.data().to_vec(),
            })
            .collect();
        tensors.sort_by(|a, b| a.name.cmp(&b.name));
        Folder { config, tensors, from: path.to_owned() }
    }

    pub fn tensor(&mut self, name: &str) -> &mut Tensor {
        self.tensors.iter_mut().find(|t| t.name == name).unwrap()
    }

    /// Removes a tensor.
    pub fn take(&mut self, name: &str) -> Tensor {
        let at = self.tensors.iter().position(|t| t.name == name).unwrap_or_else(|| panic!("{name}"));
        self.tensors.remove(at)
    }

    pub fn add(&mut self, name: impl Into<String>, dtype: &str, shape: &[usize], data: Vec<u8>) {
        self.tensors.push(Tensor { name: name.into(), dtype: dtype.into(), shape: shape.to_vec(), data });
    }

    pub fn rename(&mut self, new_name: impl Fn(&str) -> String) {
        for tensor in &mut self.tensors {
            tensor.name = new_name(&tensor.name);
        }
    }

    /// Writes the folder, with its weights in one file.
    pub fn write(&self, to: &Path) {
        self.write_settings(to);
        std::fs::write(to.join("model.safetensors"), safetensors_file(&self.tensors)).unwrap();
    }

    /// Writes the folder as mlx-lm does: its weights' file says so.
    pub fn write_as_mlx(&self, to: &Path) {
        self.write_settings(to);
        let file = safetensors_file_of(&self.tensors, json!({ "format": "mlx" }));
        std::fs::write(to.join("model.safetensors"), file).unwrap();
    }

    /// Writes the folder, with its weights in several files and an index.
    pub fn write_sharded(&self, to: &Path, shards: usize) {
        self.write_settings(to);
        let mut map = Map::new();
        for shard in 0..shards {
            let name = format!("model-{:05}-of-{shards:05}.safetensors", shard + 1);
            let tensors: Vec<Tensor> = self.tensors.iter().skip(shard).step_by(shards).cloned().collect();
            map.extend(tensors.iter().map(|t| (t.name.clone(), json!(name))));
            std::fs::write(to.join(&name), safetensors_file(&tensors)).unwrap();
        }
        let index = json!({ "metadata": {}, "weight_map": map });
        std::fs::write(to.join("model.safetensors.index.json"), index.to_string()).unwrap();
    }

    fn write_settings(&self, to: &Path) {
        std::fs::create_dir_all(to).unwrap();
        std::fs::write(to.join("config.json"), Value::Object(self.config.clone()).to_string()).unwrap();
        for name in ["tokenizer.json", "tokenizer_config.json", "generation_config.json"] {
            // Not every folder has settings for generation.
            if name != "generation_config.json" || self.from.join(name).exists() {
                std::fs::copy(self.from.join(name), to.join(name)).unwrap();
            }
        }
    }
}

/// The bytes of a safetensors file.
pub fn safetensors_file(tensors: &[Tensor]) -> Vec<u8> {
    safetensors_file_of(tensors, json!({}))
}

fn safetensors_file_of(tensors: &[Tensor], metadata: Value) -> Vec<u8> {
    let mut header = Map::from_iter([("__metadata__".to_owned(), metadata)]);
    let mut end = 0;
    for t in tensors {
        let entry = json!({ "dtype": t.dtype, "shape": t.shape, "data_offsets": [end, end + t.data.len()] });
        header.insert(t.name.clone(), entry);
        end += t.data.len();
    }
    let mut bytes = safetensors_with_header(&Value::Object(header).to_string());
    tensors.iter().for_each(|t| bytes.extend_from_slice(&t.data));
    bytes
}

/// A file that consists of a header only.
pub fn safetensors_with_header(header: &str) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes()[..], header.as_bytes()].concat()
}
