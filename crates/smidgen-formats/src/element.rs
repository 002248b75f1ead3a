//! The element types of safetensors files, little-endian.
//! They are declared in the order in which the safetensors library sorts tensors when it writes (by
//! alignment), and `Ord` follows that order.
//! Left out: the sub-byte types `F4`, `F6_E2M3`, `F6_E3M2`, which no supported checkpoint uses.

use std::fmt;

use smidgen_ir::DType;

macro_rules! elements {
    ($($variant:ident $name:literal $size_bytes:literal,)*) => {
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum Element { $($variant,)* }

        impl Element {
            pub const ALL: &'static [Element] = &[$(Element::$variant,)*];

            /// The spelling in a safetensors header.
            pub fn name(self) -> &'static str {
                match self { $(Element::$variant => $name,)* }
            }

            pub fn size_bytes(self) -> usize {
                match self { $(Element::$variant => $size_bytes,)* }
            }

            pub fn from_name(name: &str) -> Option<Element> {
                match name { $($name => Some(Element::$variant),)* _ => None }
            }
        }
    };
}

elements! {
    Bool "BOOL" 1,
    U8 "U8" 1,
    I8 "I8" 1,
    F8E5M2 "F8_E5M2" 1,
    F8E4M3 "F8_E4M3" 1,
    F8E8M0 "F8_E8M0" 1,
    F8E4M3Fnuz "F8_E4M3FNUZ" 1,
    F8E5M2Fnuz "F8_E5M2FNUZ" 1,
    I16 "I16" 2,
    U16 "U16" 2,
    F16 "F16" 2,
    Bf16 "BF16" 2,
    I32 "I32" 4,
    U32 "U32" 4,
    F32 "F32" 4,
    C64 "C64" 8,
    F64 "F64" 8,
    I64 "I64" 8,
    U64 "U64" 8,
}

impl Element {
    /// The size of a tensor of this shape, or `None` when it does not fit in a `u64`.
    pub fn tensor_bytes(self, shape: &[usize]) -> Option<u64> {
        shape.iter().try_fold(self.size_bytes() as u64, |bytes, &extent| bytes.checked_mul(extent as u64))
    }

    /// The corresponding type in memory; `None` for types that training does not use.
    pub fn dtype(self) -> Option<DType> {
        match self {
            Element::F32 => Some(DType::F32),
            Element::Bf16 => Some(DType::Bf16),
            Element::F16 => Some(DType::F16),
            _ => None,
        }
    }
}

impl fmt::Display for Element {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::Element;

    #[test]
    fn names_sizes_and_order_are_those_of_the_safetensors_library() {
        let theirs = |element: Element| -> ::safetensors::Dtype {
            serde_json::from_value(element.name().into()).unwrap()
        };
        for &element in Element::ALL {
            assert_eq!(Element::from_name(element.name()), Some(element));
            assert_eq!(element.size_bytes() * 8, theirs(element).bitsize());
        }
        assert!(Element::ALL.windows(2).all(|pair| theirs(pair[0]) < theirs(pair[1])));
    }

    #[test]
    fn tensor_bytes_refuses_to_wrap() {
        assert_eq!(Element::F32.tensor_bytes(&[]), Some(4));
        assert_eq!(Element::F32.tensor_bytes(&[3, 0]), Some(0));
        assert_eq!(Element::Bf16.tensor_bytes(&[3, 5]), Some(30));
        assert_eq!(Element::F32.tensor_bytes(&[usize::MAX, 2]), None);
        assert_eq!(Element::Bf16.tensor_bytes(&[1 << 63]), None);
    }
}
