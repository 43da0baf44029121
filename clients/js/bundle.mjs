// Bundles for pages without a bundler of their own: dist/page holds the client and its worker, with ONNX Runtime beside them.
import { cp, mkdir } from "node:fs/promises";
import { createRequire } from "node:module";
import { dirname, join } from "node:path";
import { build } from "esbuild";

const runtime = join(dirname(createRequire(import.meta.url).resolve("onnxruntime-web")));
await build({
  entryPoints: { "burnish-runtime": "dist/browser.js", worker: "dist/worker.js" },
  outdir: "dist/page",
  bundle: true,
  splitting: true,
  format: "esm",
  minify: true,
  conditions: ["onnxruntime-web-use-extern-wasm"],
  logLevel: "warning",
});
await mkdir("dist/page/wasm", { recursive: true });
for (const kind of ["", ".asyncify"]) {
  for (const suffix of ["mjs", "wasm"]) {
    await cp(join(runtime, `ort-wasm-simd-threaded${kind}.${suffix}`), `dist/page/wasm/ort-wasm-simd-threaded${kind}.${suffix}`);
  }
}
