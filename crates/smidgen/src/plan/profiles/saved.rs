//! A device profile as a JSON file: `smidgen doctor` writes it, and later plans read it.
//!
//! The file names its device and the version that measured it. A plan for this machine uses it only if both match; a
//! recipe may name any file. Every number is checked: rates are above zero, times at least zero.

use serde_json::{Value, json};
use smidgen_compile::{DeviceProfile, Link, Overhead, Rates, links};
use smidgen_formats::json_file::{JsonFileError, MAX_CONFIG_BYTES, read_chosen_bytes};
use smidgen_formats::whole_file::{WriteFileError, write_whole};
use smidgen_ir::DeviceKind;
use std::path::{Path, PathBuf};
use thiserror::Error;

pub const VERSION: &str = env!("CARGO_PKG_VERSION");

#[derive(Debug, Error)]
pub enum ProfileError {
    #[error("cannot read the profile `{}`: {source}", path.display())]
    Read { path: PathBuf, source: std::io::Error },
    #[error("the profile `{}` is not JSON: {source}", path.display())]
    Json { path: PathBuf, source: serde_json::Error },
    #[error("the profile `{}`: `{field}` must be {expected}", path.display())]
    Field { path: PathBuf, field: String, expected: &'static str },
    #[error("the profile `{}` is for `{name}`, measured by smidgen {version}", path.display())]
    Other { path: PathBuf, name: String, version: String },
}

/// Reads any profile.
pub fn read(path: &Path) -> Result<DeviceProfile, ProfileError> {
    read_value(path).and_then(|value| parse(&value).map_err(|wrong| wrong.in_file(path)))
}

/// Reads the profile of this device, if this version measured it.
pub fn read_of(path: &Path, name: &str) -> Result<DeviceProfile, ProfileError> {
    let value = read_value(path)?;
    let profile = parse(&value).map_err(|wrong| wrong.in_file(path))?;
    let version = value["smidgen"].as_str().unwrap_or("unknown").to_owned();
    if profile.name == name && version == VERSION {
        Ok(profile)
    } else {
        Err(ProfileError::Other { path: path.to_path_buf(), name: profile.name, version })
    }
}

pub fn write(path: &Path, profile: &DeviceProfile) -> Result<(), WriteFileError> {
    if let Some(folder) = path.parent() {
        let step = "making its folder";
        std::fs::create_dir_all(folder).map_err(|source| WriteFileError {
            path: path.to_path_buf(),
            step,
            source,
        })?;
    }
    let text = format!("{:#}\n", render(profile));
    write_whole(path, |out| out.write_all(text.as_bytes()))
}

pub fn render(profile: &DeviceProfile) -> Value {
    json!({
        "smidgen": VERSION,
        "name": profile.name,
        "device": profile.device.name(),
        "memory_bytes": profile.memory_bytes,
        "overhead": render_overhead(&profile.overhead),
        "f32": render_rates(&profile.f32),
        "bf16": render_rates(&profile.half),
        "fetch_bytes_per_s": profile.fetch_bytes_per_s,
        "stow_bytes_per_s": profile.stow_bytes_per_s,
        "disk_bytes_per_s": profile.disk_bytes_per_s,
        "update_bytes_per_s": profile.update_bytes_per_s,
        "travel_s_per_byte": profile.transfer_s_per_byte,
        "peers": render_link(profile.peers),
        "network": render_link(profile.network),
    })
}

fn render_overhead(overhead: &Overhead) -> Value {
    json!({
        "fixed_bytes": overhead.fixed_bytes,
        "thread_bytes": overhead.thread_bytes,
        "step_bytes": overhead.step_bytes,
        "margin_bytes": overhead.margin_bytes,
    })
}

fn render_link(link: Link) -> Value {
    json!({ "bytes_per_s": link.bytes_per_s, "latency_s": link.latency_s })
}

fn render_rates(rates: &Rates) -> Value {
    json!({
        "product_flops_per_s": rates.matmul_flops_per_s,
        "bf16_product_flops_per_s": rates.bf16_matmul_flops_per_s,
        "outer_flops_per_s": rates.weight_gradient_flops_per_s,
        "attention_flops_per_s": rates.attention_flops_per_s,
        "bytes_per_s": rates.bytes_per_s,
        "step_s": rates.step_s,
        "plain_operand_s": rates.plain_operand_s,
        "coded_operand_s": rates.coded_operand_s,
    })
}

fn read_value(path: &Path) -> Result<Value, ProfileError> {
    let unread = |source| ProfileError::Read { path: path.to_path_buf(), source };
    let bytes = read_chosen_bytes(path, MAX_CONFIG_BYTES).map_err(|error| match error {
        JsonFileError::Read { source, .. } => unread(source),
        error => unread(std::io::Error::new(std::io::ErrorKind::InvalidInput, error.to_string())),
    })?;
    serde_json::from_slice(&bytes).map_err(|source| ProfileError::Json { path: path.to_path_buf(), source })
}

/// A field that is missing or has a wrong value.
#[derive(Debug, PartialEq, Eq)]
struct Wrong {
    field: String,
    expected: &'static str,
}

impl Wrong {
    fn in_file(self, path: &Path) -> ProfileError {
        ProfileError::Field { path: path.to_path_buf(), field: self.field, expected: self.expected }
    }
}

fn parse(value: &Value) -> Result<DeviceProfile, Wrong> {
    let fields = Fields { within: "", value };
    let kinds = [DeviceKind::Cpu, DeviceKind::Cuda];
    let device = kinds.into_iter().find(|kind| value["device"] == kind.name());
    Ok(DeviceProfile {
        name: fields.text("name")?,
        device: device.ok_or_else(|| fields.wrong("device", "`cpu` or `cuda`"))?,
        memory_bytes: fields.bytes("memory_bytes")?,
        overhead: parse_overhead(&value["overhead"])?,
        f32: parse_rates("f32.", &value["f32"])?,
        half: parse_rates("bf16.", &value["bf16"])?,
        fetch_bytes_per_s: fields.rate("fetch_bytes_per_s")?,
        stow_bytes_per_s: fields.rate("stow_bytes_per_s")?,
        disk_bytes_per_s: fields.rate("disk_bytes_per_s")?,
        // Profiles of 0.12 do not have it.
        update_bytes_per_s: match value.get("update_bytes_per_s") {
            Some(_) => fields.rate("update_bytes_per_s")?,
            None => DeviceProfile::cpu(1).update_bytes_per_s,
        },
        transfer_s_per_byte: fields.time("travel_s_per_byte")?,
        peers: parse_link("peers", &value["peers"])?,
        network: parse_link("network", &value["network"])?,
    })
}

fn parse_overhead(value: &Value) -> Result<Overhead, Wrong> {
    let fields = Fields { within: "overhead.", value };
    let bytes = |name| fields.bytes(name)?.ok_or_else(|| fields.wrong(name, "a number of bytes"));
    Ok(Overhead {
        fixed_bytes: bytes("fixed_bytes")?,
        thread_bytes: bytes("thread_bytes")?,
        step_bytes: bytes("step_bytes")?,
        margin_bytes: bytes("margin_bytes")?,
    })
}

/// A link by its numbers, or by its name in the table of links.
fn parse_link(field: &'static str, value: &Value) -> Result<Link, Wrong> {
    const EXPECTED: &str = "the name of a link, or its `bytes_per_s` and `latency_s`";
    let wrong = || Wrong { field: field.into(), expected: EXPECTED };
    if let Some(name) = value.as_str() {
        return links::find(name).map(|link| link.link()).ok_or_else(wrong);
    }
    let fields = Fields { within: "", value };
    Ok(Link {
        bytes_per_s: fields.rate("bytes_per_s").map_err(|_| wrong())?,
        latency_s: fields.time("latency_s").map_err(|_| wrong())?,
    })
}

fn parse_rates(within: &'static str, value: &Value) -> Result<Rates, Wrong> {
    let fields = Fields { within, value };
    Ok(Rates {
        matmul_flops_per_s: fields.rate("product_flops_per_s")?,
        bf16_matmul_flops_per_s: fields.rate("bf16_product_flops_per_s")?,
        weight_gradient_flops_per_s: fields.rate("outer_flops_per_s")?,
        attention_flops_per_s: fields.rate("attention_flops_per_s")?,
        bytes_per_s: fields.rate("bytes_per_s")?,
        step_s: fields.time("step_s")?,
        plain_operand_s: fields.time("plain_operand_s")?,
        coded_operand_s: fields.time("coded_operand_s")?,
    })
}

/// The fields of a JSON object; another value has none.
struct Fields<'a> {
    /// Prefix of names in messages.
    within: &'static str,
    value: &'a Value,
}

impl Fields<'_> {
    fn wrong(&self, field: &str, expected: &'static str) -> Wrong {
        Wrong { field: format!("{}{field}", self.within), expected }
    }

    fn number(&self, field: &str) -> Option<f64> {
        self.value.get(field)?.as_f64().filter(|number| number.is_finite())
    }

    fn rate(&self, field: &str) -> Result<f64, Wrong> {
        let number = self.number(field).filter(|number| *number > 0.0);
        number.ok_or_else(|| self.wrong(field, "a number above 0"))
    }

    fn time(&self, field: &str) -> Result<f64, Wrong> {
        let number = self.number(field).filter(|number| *number >= 0.0);
        number.ok_or_else(|| self.wrong(field, "a number of at least 0"))
    }

    fn bytes(&self, field: &str) -> Result<Option<u64>, Wrong> {
        match self.value.get(field) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => {
                value.as_u64().map(Some).ok_or_else(|| self.wrong(field, "a whole number of bytes, or null"))
            }
        }
    }

    fn text(&self, field: &str) -> Result<String, Wrong> {
        let text = self.value.get(field).and_then(Value::as_str);
        text.map(str::to_owned).ok_or_else(|| self.wrong(field, "a string"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use smidgen_compile::cards;

    #[test]
    fn a_written_profile_reads_back() {
        let folder = tempfile::tempdir().unwrap();
        for (index, profile) in
            [DeviceProfile::cpu(2), cards::find("h200").unwrap().profile()].into_iter().enumerate()
        {
            let path = folder.path().join(format!("not/yet/there/{index}.json"));
            write(&path, &profile).unwrap();
            assert_eq!(read(&path).unwrap(), profile);
            assert_eq!(read_of(&path, &profile.name).unwrap(), profile);
            let other = read_of(&path, "another").unwrap_err().to_string();
            assert!(other.contains(&format!("is for `{}`", profile.name)), "{other}");
        }
    }

    #[test]
    fn a_profile_of_another_version_is_not_used() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("p.json");
        let mut value = render(&DeviceProfile::cpu(2));
        value["smidgen"] = json!("0.0.1");
        std::fs::write(&path, value.to_string()).unwrap();
        assert!(read(&path).is_ok());
        let refused = read_of(&path, "cpu").unwrap_err().to_string();
        assert!(refused.ends_with("is for `cpu`, measured by smidgen 0.0.1"), "{refused}");
    }

    #[test]
    fn every_field_is_required_and_checked() {
        let sound = render(&DeviceProfile::cpu(2));
        assert!(parse(&sound).is_ok());
        let broken = |pointer: &str, with: Value| {
            let mut value = sound.clone();
            *value.pointer_mut(pointer).unwrap() = with;
            parse(&value).unwrap_err()
        };
        let above = "a number above 0";
        for (pointer, with, field, expected) in [
            ("/name", json!(3), "name", "a string"),
            ("/device", json!("tpu"), "device", "`cpu` or `cuda`"),
            ("/memory_bytes", json!(-1), "memory_bytes", "a whole number of bytes, or null"),
            ("/fetch_bytes_per_s", json!(0), "fetch_bytes_per_s", above),
            ("/f32/bytes_per_s", json!("fast"), "f32.bytes_per_s", above),
            ("/f32", json!([]), "f32.product_flops_per_s", above),
            ("/bf16/product_flops_per_s", json!(-1e9), "bf16.product_flops_per_s", above),
            ("/bf16/step_s", json!(null), "bf16.step_s", "a number of at least 0"),
        ] {
            assert_eq!(broken(pointer, with), Wrong { field: field.into(), expected });
        }
        assert!(parse(&json!([1])).is_err());
    }
}
