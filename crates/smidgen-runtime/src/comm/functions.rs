//! The table of functions of a library that is opened at run time: one line per function, one macro for NCCL and MPI.
//!
//! `functions!` makes a struct `Abi` with a field per function, and `Abi::resolve`, which finds all of them or returns an
//! error with the name of the first that is missing. The library stays open as long as the table exists.

/// Makes `Abi` from lines of name, symbol, arguments and result.
macro_rules! functions {
    ($($name:ident = $symbol:literal ( $($argument:ty),* ) -> $result:ty;)*) => {
        /// The functions of an opened library.
        pub struct Abi {
            $(pub $name: unsafe extern "C" fn($($argument),*) -> $result,)*
            pub path: PathBuf,
            _library: Library,
        }

        impl Abi {
            fn resolve(library: Library, path: &Path) -> Result<Abi, CommError> {
                let missing = |symbol: &str| CommError::Symbol { path: path.to_owned(), symbol: symbol.to_owned() };
                Ok(Abi {
                    $($name: {
                        // SAFETY: the line states the signature that the library documents.
                        let symbol = unsafe {
                            library.get::<unsafe extern "C" fn($($argument),*) -> $result>($symbol.as_bytes())
                        };
                        *symbol.map_err(|_| missing($symbol))?
                    },)*
                    path: path.to_owned(),
                    _library: library,
                })
            }
        }
    };
}

pub(super) use functions;
