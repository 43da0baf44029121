// A page in headless Chromium, and the server on this machine that it loads from.
import { createReadStream, existsSync, statSync } from "node:fs";
import { createServer } from "node:http";
import { extname, join, normalize } from "node:path";

import puppeteer from "puppeteer-core";

const TYPES = {
  ".html": "text/html", ".js": "text/javascript", ".mjs": "text/javascript", ".css": "text/css", ".json": "application/json",
  ".wasm": "application/wasm", ".svg": "image/svg+xml",
};
/** WebGPU on a CPU, by SwiftShader. */
export const WEBGPU = [
  "--enable-unsafe-webgpu", "--use-webgpu-adapter=swiftshader", "--enable-features=Vulkan", "--use-vulkan=swiftshader", "--use-angle=swiftshader",
];

/** The path of Chromium, or undefined. */
export function chromium() {
  const candidates = [process.env.CHROMIUM, "/usr/bin/chromium", "/usr/bin/chromium-browser", "/usr/bin/google-chrome"];
  return candidates.find((path) => path && existsSync(path));
}

/**
 * Serve folders by the first part of the path: `{ dist: "/somewhere/dist" }` answers `/dist/...`.
 *
 * The page is isolated, as threads in WebAssembly ask for.
 */
export async function serve(folders) {
  const server = createServer((request, response) => {
    const path = normalize(decodeURIComponent(new URL(request.url, "http://localhost").pathname));
    const [, first, ...rest] = path.split("/");
    const headers = { "Cross-Origin-Opener-Policy": "same-origin", "Cross-Origin-Embedder-Policy": "require-corp" };
    if (path === "/") return response.writeHead(200, { ...headers, "Content-Type": "text/html" }).end("<!doctype html><title>test</title>");
    const file = folders[first] && join(folders[first], ...rest);
    if (!file || path.includes("..") || !existsSync(file) || !statSync(file).isFile()) return response.writeHead(404, headers).end();
    response.writeHead(200, { ...headers, "Content-Type": TYPES[extname(file)] ?? "application/octet-stream" });
    createReadStream(file).pipe(response);
  });
  await new Promise((resolve) => server.listen(0, "127.0.0.1", resolve));
  return { address: `http://127.0.0.1:${server.address().port}`, close: () => server.close() };
}

/** Open Chromium; `page` is empty, and of the server. What a page logs as an error is gathered in `errors`. */
export async function browse(address, flags = []) {
  const browser = await puppeteer.launch({
    executablePath: chromium(), headless: true, protocolTimeout: 600_000, args: ["--no-sandbox", "--disable-dev-shm-usage", ...flags],
  });
  const page = await browser.newPage();
  const errors = [];
  page.on("pageerror", (error) => errors.push(String(error)));
  page.on("console", (message) => message.type() === "error" && errors.push(message.text()));
  await page.goto(address);
  return { browser, page, errors };
}
