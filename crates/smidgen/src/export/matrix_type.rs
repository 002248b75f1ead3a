//! The types of matrices in an exported model: one type, or a mixture with the names that llama.cpp gives them.
//!
//! A mixture has more bits where they matter most, by the rules of llama.cpp's quantizer: the head (a tied embedding is
//! the head), and values and down projections of every third layer and of those at both ends.
//! Left out: importance matrices, and what llama.cpp does otherwise for models of a certain size.

use smidgen_formats::gguf::architecture::SHORT_CONVOLUTION;
use smidgen_ir::{Block, DType, Storage};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MatrixType {
    F32,
    F16,
    Q8_0,
    Q6K,
    Q5KM,
    Q4KM,
}

/// What decides the type of a matrix.
#[derive(Clone, Copy, Debug)]
pub struct MatrixPlace<'a> {
    /// Its name in the file.
    pub name: &'a str,
    pub columns: usize,
    pub layers: usize,
    /// Whether the embedding is the head too.
    pub is_tied: bool,
}

impl MatrixType {
    /// The value of `general.file_type`.
    pub fn file_type(self) -> u32 {
        match self {
            MatrixType::F32 => 0,
            MatrixType::F16 => 1,
            MatrixType::Q8_0 => 7,
            MatrixType::Q4KM => 15,
            MatrixType::Q5KM => 17,
            MatrixType::Q6K => 18,
        }
    }

    /// The storage of a matrix, whatever the length of its rows.
    pub fn wanted(self, place: &MatrixPlace<'_>) -> Storage {
        let most = match self {
            MatrixType::F32 => return Storage::F32,
            MatrixType::F16 => return Storage::Plain(DType::F16),
            MatrixType::Q8_0 => return Storage::Gguf(Block::Q8_0),
            MatrixType::Q6K => Block::Q6K,
            MatrixType::Q5KM => Block::Q5K,
            MatrixType::Q4KM => Block::Q4K,
        };
        let is_head = place.name == "output.weight" || (place.is_tied && place.name == "token_embd.weight");
        let of_layer = place.name.strip_prefix("blk.").and_then(|rest| rest.split_once('.'));
        let block = match of_layer {
            _ if is_head => Block::Q6K,
            Some((_, "attn_qkv.weight")) if most == Block::Q4K => Block::Q5K,
            Some((_, "attn_qkv.weight")) => Block::Q6K,
            Some((layer, "attn_v.weight" | "ffn_down.weight"))
                if layer.parse().is_ok_and(|layer| has_more_bits(layer, place.layers)) =>
            {
                Block::Q6K
            }
            _ => most,
        };
        Storage::Gguf(block)
    }

    /// The storage of a matrix: the wanted one if its rows are whole blocks, else Q8_0, else F16. Convolutions have F32.
    pub fn storage(self, place: &MatrixPlace<'_>) -> Storage {
        let fits = |storage: &Storage| match storage {
            Storage::Gguf(block) => place.columns.is_multiple_of(block.elements()),
            _ => true,
        };
        if place.name.ends_with(SHORT_CONVOLUTION) {
            return Storage::F32;
        }
        let choices = [self.wanted(place), Storage::Gguf(Block::Q8_0), Storage::Plain(DType::F16)];
        choices.into_iter().find(fits).unwrap_or(Storage::F32)
    }
}

fn has_more_bits(layer: usize, layers: usize) -> bool {
    let eighth = layers / 8;
    layer < eighth || layer >= 7 * layers / 8 || (layer - eighth) % 3 == 2
}

#[cfg(test)]
mod tests {
    use super::*;

    fn storage(kind: MatrixType, name: &str, columns: usize, is_tied: bool) -> String {
        kind.storage(&MatrixPlace { name, columns, layers: 32, is_tied }).to_string()
    }

    #[test]
    fn mixtures_have_more_bits_where_llama_cpp_has_them() {
        use MatrixType::{Q4KM, Q5KM, Q6K, Q8_0};
        let more: Vec<usize> = (0..32).filter(|layer| has_more_bits(*layer, 32)).collect();
        assert_eq!(more, [0, 1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, 28, 29, 30, 31]);
        for (kind, name, is_tied, expected) in [
            (Q4KM, "output.weight", false, "q6_k"),
            (Q4KM, "token_embd.weight", false, "q4_k"),
            (Q4KM, "token_embd.weight", true, "q6_k"),
            (Q4KM, "blk.4.attn_v.weight", false, "q4_k"),
            (Q4KM, "blk.6.attn_v.weight", false, "q6_k"),
            (Q4KM, "blk.31.ffn_down.weight", false, "q6_k"),
            (Q4KM, "blk.31.ffn_up.weight", false, "q4_k"),
            (Q4KM, "blk.5.attn_qkv.weight", false, "q5_k"),
            (Q5KM, "blk.5.attn_qkv.weight", false, "q6_k"),
            (Q5KM, "blk.5.ffn_gate.weight", false, "q5_k"),
            (Q6K, "blk.5.ffn_down.weight", false, "q6_k"),
            (Q8_0, "output.weight", false, "q8_0"),
        ] {
            assert_eq!(storage(kind, name, 4096, is_tied), expected, "{kind:?} {name}");
        }
        assert_eq!(storage(Q4KM, "blk.0.ffn_up.weight", 96, false), "q8_0");
        assert_eq!(storage(Q4KM, "blk.0.ffn_up.weight", 100, false), "f16");
        assert_eq!(storage(MatrixType::F32, "blk.0.ffn_up.weight", 100, false), "f32");
    }
}
